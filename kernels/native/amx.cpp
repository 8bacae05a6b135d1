// Whether this build has tiles, whether the system lets this process use them, and what the reference says.
#include "amx.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Returns 0 where tiles may be used, 1 in a build without them, or 2 where the system refuses them. Linux keeps
// 8 KB a thread for them, of a process that has asked once (arch/x86/include/uapi/asm/prctl.h).
extern "C" int omnikv_allow_tiles() {
#if !defined(HAS_TILES)
    return 1;
#elif defined(OMNIKV_AMX_REFERENCE)
    return 0;
#elif defined(__x86_64__) && defined(__linux__)
    constexpr long ARCH_GET_XCOMP_PERM = 0x1022, ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    unsigned long allowed = 0;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA)) return 2;
    if (syscall(SYS_arch_prctl, ARCH_GET_XCOMP_PERM, &allowed)) return 2;
    return allowed >> XTILEDATA & 1 ? 0 : 2;
#else
    return 2;  // other systems know no such question
#endif
}

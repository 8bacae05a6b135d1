"""The names of methods that a command line takes, known before torch is imported; the registry has
their classes (tests/engine/serve/test_flags.py holds the two together).
"""

NAMES = (
    "a2sf",
    "ada_pyramid",
    "ada_snapkv",
    "brutal_offload",
    "full",
    "h2o",
    "h2o_plus",
    "infllm",
    "keyformer",
    "lm_infinite",
    "minference",
    "omnikv",
    "omnikv_newest",
    "omnikv_one",
    "omnikv_per_layer",
    "omnikv_random",
    "omnikv_unpacked",
    "pod_untrained",
    "pyramidkv",
    "quest",
    "scissorhands",
    "snapkv",
    "streaming_llm",
    "tidaldecode",
    "window",
)

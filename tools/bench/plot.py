"""Three plots of a benchmark summary: ms per token by context with the floor, speed-up by context,
memory by context. Needs matplotlib.
"""

from pathlib import Path


def plots(summary, folder):
    """Write latency.png, speedup.png and memory.png into a folder; returns their paths. Raises
    ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    cells = [c for c in summary["cells"] if c["test"] == "tg" and "ms_median" in c]
    title = (
        f"{summary['model']['name']}, {summary['model']['dtype']}, "
        f"{summary['header']['hardware'].split(',')[0]}"
    )
    names = list(dict.fromkeys(c["name"] for c in cells))
    made = []

    def figure(name, label, draw):
        fig, ax = plt.subplots(figsize=(7.5, 4.8))
        draw(ax)
        ticks = sorted({c["n"] for c in cells})
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=20)
        ax.set_xlabel("tokens of context")
        ax.set_ylabel(label)
        ax.set_title(title, fontsize=10)
        ax.grid(True, alpha=0.3)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8)
        fig.tight_layout()
        made.append(folder / f"{name}.png")
        fig.savefig(made[-1], dpi=130)
        plt.close(fig)

    def rows(name, key):
        found = sorted(
            (c["n"], c[key]) for c in cells if c["name"] == name and c.get(key) is not None
        )
        return [n for n, _ in found], [value for _, value in found]

    def latency(ax):
        for number, name in enumerate(names):
            ax.plot(*rows(name, "ms_median"), "o-", color=f"C{number}", label=name)
            if rows(name, "floor_ms")[0]:
                ax.plot(*rows(name, "floor_ms"), ":", color=f"C{number}", label=f"{name}, floor")
        ax.set_yscale("log")
        for axis_formatter in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            axis_formatter(lambda value, _: f"{value:g}")

    def speedup(ax):
        for number, name in enumerate(names):
            if rows(name, "vs_full")[0]:
                ax.plot(*rows(name, "vs_full"), "o-", color=f"C{number}", label=name)
        ax.axhline(1.0, color="black", linewidth=0.8, label="full attention")

    def memory(ax):
        for number, name in enumerate(names):
            found = sorted(
                (m["n"], m["planned"] / 1e9, m["measured"] / 1e9)
                for m in summary["memory"]
                if m["name"] == name and m["n"]
            )
            if found:
                ax.plot(
                    [m[0] for m in found],
                    [m[2] for m in found],
                    "o-",
                    color=f"C{number}",
                    label=f"{name}, measured",
                )
                ax.plot(
                    [m[0] for m in found],
                    [m[1] for m in found],
                    ":",
                    color=f"C{number}",
                    label=f"{name}, planned",
                )

    figure("latency", "ms per token (median)", latency)
    figure("speedup", "times as fast as full attention", speedup)
    figure("memory", "GB beside the weights", memory)
    return made

"""A flame graph as one page for a browser, without a network: the callers above, what they call below."""

from collections.abc import Iterator
from html import escape

from harness.report.check.sentences import printable
from harness.results.trace import FlameFrame

LEAST_SHARE = 0.001
"""Of the whole: what is narrower is left out."""
_MAX_DEPTH = 200
_STYLE = """
:root { color-scheme: light dark; --paper: #fdfdfb; --ink: #1c1d1f; --quiet: #6b6d70; }
@media (prefers-color-scheme: dark) { :root { --paper: #151617; --ink: #e4e3df; --quiet: #94979a; } }
body { margin: 0; padding: 1.5rem; background: var(--paper); color: var(--ink); font: 14px/1.4 system-ui, sans-serif; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } p { color: var(--quiet); }
.flame { overflow-x: auto; } .flame > div { min-width: 40rem; }
.row { display: flex; } .frame { min-width: 0; }
.name { display: block; height: 1.15rem; margin: 0 1px 1px 0; padding: 0 .25rem; overflow: hidden; white-space: nowrap;
  text-overflow: ellipsis; font: 11px/1.15rem ui-monospace, monospace; color: #1c1d1f; border-radius: 1px; }
.c0 { background: #e8c27a; } .c1 { background: #dfa573; } .c2 { background: #86bbd8; } .c3 { background: #a9c9a4; }
"""


def flame_html(root: FlameFrame) -> str:
    """Return the page."""
    title = escape(printable(root.name))
    body = "".join(_frames(root, root.total_us or 1.0, 0))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
        f"<p>{root.total_us / 1e3:,.2f} ms on the CPU, all threads; point at a frame for its time. "
        f'Frames below {LEAST_SHARE:.1%} are left out.</p><div class="flame"><div>{body}</div></div></html>\n'
    )


def _frames(outer: FlameFrame, whole_us: float, depth: int) -> Iterator[str]:
    """Yield what an outer frame calls, side by side, each with what it calls below."""
    children = [child for child in outer.children.values() if child.total_us >= LEAST_SHARE * whole_us]
    if not children or depth > _MAX_DEPTH:
        return
    yield '<div class="row">'
    for child in sorted(children, key=lambda child: -child.total_us):
        share = 100 * child.total_us / max(outer.total_us, sum(one.total_us for one in children))
        about = (
            f"{child.name} · {child.total_us / 1e3:,.3f} ms, {child.total_us / whole_us:.1%} · {child.count:,} times"
        )
        yield f'<div class="frame" style="width:{share:.3f}%">'
        yield f'<span class="name c{_color(child.name)}" title="{escape(printable(about))}">'
        yield f"{escape(printable(child.name))}</span>"
        yield from _frames(child, whole_us, depth + 1)
        yield "</div>"
    yield "</div>"


def _color(name: str) -> int:
    """Return a colour by kind: module, Python function, operator, anything else."""
    if name.startswith("nn.Module"):
        return 0
    return 2 if "::" in name else 1 if "): " in name else 3

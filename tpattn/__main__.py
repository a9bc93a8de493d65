"""`python -m tpattn check`: does tpattn work on this machine?"""

from __future__ import annotations

import sys

from tpattn import selfcheck

_USAGE = """usage: python -m tpattn check

check     versions, back ends, devices, groups, an all-reduce and a parity test on 2 local processes, with a verdict, in seconds;
          under torchrun on the processes that it starts: torchrun --standalone --nproc-per-node 4 -m tpattn check"""


def main(argv: list[str]) -> int:
    """The exit status: 0, 1 when the check fails, 2 for a command that there is not."""
    if argv == ["check"]:
        return selfcheck.check()
    if argv in ([], ["--help"], ["-h"]):
        print(_USAGE)
        return 0
    print(f"error: {' '.join(argv)}: not understood\n{_USAGE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Writes on from a prompt with a trained model, token by token, on one process or on any mesh.

    python scripts/generate.py runs/ID "def main("
    python scripts/generate.py runs/ID - < prompt.txt                  the prompt from standard input
    torchrun --standalone --nproc-per-node 4 scripts/generate.py runs/ID "def main(" --tp 2 --cp 2 --temperature 0.8 --top-p 0.95

Model and tokenizer are those of the checkpoint. The same seed gives the same text on every mesh. Ctrl-C, or a reader that goes
away, ends it after the token at hand (at Ctrl-C torchrun adds a traceback of its own).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the tpattn beside this script, installed or not

from tpattn import ParallelContext, Unsupported  # noqa: E402
from tpattn.config import one_message, saved_model  # noqa: E402
from tpattn.data import TextStream, Tokenizer  # noqa: E402
from tpattn.decode import check_sampling, generate  # noqa: E402
from tpattn.training import from_rank0, together  # noqa: E402


class Parser(argparse.ArgumentParser):
    """Mistakes are one message from one rank, as elsewhere."""

    def error(self, message: str) -> NoReturn:
        raise Unsupported(f"{message}; python {Path(sys.argv[0]).name} --help lists what there is")

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder (its newest checkpoint is taken), or a checkpoint")
    parser.add_argument("prompt", help="the text to go on from; - reads it from standard input; '' begins a document")
    parser.add_argument("--dp", type=int, default=-1, help="ranks that do the same; -1 = what is left")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share the tokens of the text")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each weight")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="where the model ends no document before (200)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = the likeliest token (0); 0.8 = livelier")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens that have this share (1)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    args = parser.parse_args(argv)
    check_sampling(args.temperature, args.top_p)
    if args.max_new_tokens < 0:
        parser.error(f"--max-new-tokens={args.max_new_tokens}: needed: 0 or more")
    return args


def main() -> None:
    with ExitStack() as stack, Stop() as stopped:
        with one_message():
            args = arguments()
            ctx = stack.enter_context(ParallelContext.from_env(dp=args.dp, cp=args.cp, tp=args.tp))
            prompt = from_rank0(together(lambda: read_prompt(args.prompt) if ctx.world.rank == 0 else "", ctx), ctx)
            model, tokenizer, cfg = saved_model(args.run, ctx)
            ids = tokenizer.encode(prompt).tolist() or [tokenizer.end]
            out = Output(ctx.world.rank == 0, tokenizer, stopped)
            out.write(ids)
            tokens = generate(
                model,
                ids,
                ctx=ctx,
                max_new_tokens=args.max_new_tokens,
                temperature=args.temperature,
                top_p=args.top_p,
                seed=args.seed,
                end=tokenizer.end,
                window=cfg.train.seq_len,
                limit=tokenizer.vocab_size,
                stop=stopped,
            )
            for token in tokens:
                out.write([token])
            out.close()
    sys.exit(130 if stopped.by_ctrl_c else 0)


def read_prompt(word: str) -> str:
    raw = sys.stdin.buffer.read() if word == "-" else os.fsencode(word)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unsupported(f"the prompt is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}") from None


class Stop:
    """Whether to end: after Ctrl-C, or when nobody reads any more. A second Ctrl-C ends at once."""

    by_ctrl_c = unread = False

    def __enter__(self) -> Stop:
        self.before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def _interrupt(self, *_: object) -> None:
        self.by_ctrl_c = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # for the second

    def __call__(self) -> bool:
        return self.by_ctrl_c or self.unread


class Output:
    """The text on standard output as it comes, from one rank."""

    def __init__(self, speaks: bool, tokenizer: Tokenizer, stopped: Stop) -> None:
        self.speaks, self.stopped, self.text = speaks, stopped, TextStream(tokenizer)

    def write(self, ids: list[int]) -> None:
        if self.speaks:
            self._print(self.text.add(*ids))

    def close(self) -> None:
        if self.speaks:
            self._print(self.text.end() + "\n")

    def _print(self, text: str) -> None:
        if self.stopped.unread:
            return
        if sys.stdout.isatty():  # a control character could do anything to a terminal
            text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            self.stopped.unread = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end


if __name__ == "__main__":
    main()

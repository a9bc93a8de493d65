"""Generated text: the same ids on every rank and mesh; greedy, temperature and top-p against naive references."""

import math
import random

import pytest
import torch
from pool import ranks
from small_run import V, small

import tpattn
from tpattn import ParallelContext, Unsupported, ledger
from tpattn.decode import choose, generate
from tpattn.random import fold, uniform

MESHES = {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)], 3: [(3, 1, 1), (1, 3, 1), (1, 1, 3)],
          4: [(1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 4, 1)]}
PROMPT = [3, 28, 0, 7, 7]
SAMPLED = {"temperature": 1.3, "top_p": 0.9, "seed": 4}


def alone(tokens=PROMPT, n=9, make=small, **options):
    ctx = ParallelContext.single()
    return list(generate(make(ctx), tokens, ctx=ctx, max_new_tokens=n, **options))


def naive(model, tokens, n, temperature=0.0, top_p=1.0, seed=0):
    """By plain loops over Python floats, the whole text in each forward, no padding."""
    tokens = list(tokens)
    for _ in range(n):
        with torch.no_grad():
            tokens.append(naive_choice(model(torch.tensor(tokens)[None])[0, -1].tolist(), temperature, top_p,
                                       uniform(fold(seed, "generate"), torch.tensor(len(tokens))).item()))
    return tokens[-n:]


def kept_by(logits, temperature, top_p):
    """{id: probability} of the smallest set that reaches top_p: sorted by falling probability, then by id."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    kept, mass = {}, 0.0
    for i in order:
        kept[i] = weights[i] / sum(weights)
        mass += kept[i]
        if top_p < 1 and mass >= top_p:
            break
    return kept


def naive_choice(logits, temperature, top_p, chance):
    if temperature == 0:
        return logits.index(max(logits))
    kept = kept_by(logits, temperature, top_p)
    left = chance * sum(kept.values())
    for i in sorted(kept):
        left -= kept[i]
        if left < 0:
            return i
    return max(kept)


# -------------------------------------------------------------------------------------------------------------- one token


def test_a_choice_equals_the_naive_one():
    """Random logits with equal ones among them, any temperature and top_p."""
    draw = random.Random(1)
    for _ in range(400):
        logits = [draw.choice([draw.gauss(0, 3), 1.0, -2.0]) for _ in range(draw.randint(1, 12))]
        temperature, top_p = draw.choice([0.0, 0.3, 1.0, 4.0]), draw.choice([0.05, 0.5, 0.77, 0.99, 1.0])
        chance = draw.random()
        got = choose(torch.tensor(logits, dtype=torch.float64), temperature, top_p, chance)
        assert got == naive_choice(logits, temperature, top_p, chance), (logits, temperature, top_p, chance)


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, [2]), (0.5, [2]), (0.5000001, [0, 2]), (0.75, [0, 2]), (0.76, [0, 1, 2]),
                                             (0.875, [0, 1, 2]), (0.876, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3])])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    """Probabilities 1/4, 1/8, 1/2, 1/8 at ids 0 to 3: of the two eighths the lower id comes first; -inf is never drawn."""
    logits = torch.tensor([0.25, 0.125, 0.5, 0.125, 0.0], dtype=torch.float64).log()
    drawn = [choose(logits, 1.0, top_p, chance / 1000) for chance in range(1000)]
    assert sorted(set(drawn)) == kept
    assert drawn == sorted(drawn)       # in the order of ids
    assert choose(logits, 1.0, top_p, 1 - 2**-53) == kept[-1]


def test_of_many_equal_tokens_the_lowest_ids_are_kept():
    """A sort that is not stable would keep others."""
    logits = torch.zeros(4096)
    assert [choose(logits, 1.0, 0.25, chance) for chance in (0.0, 0.5, 1 - 2**-53)] == [0, 512, 1023]


def test_the_likeliest_of_equals_is_the_lowest_id_and_precision_does_not_matter():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits = torch.tensor([0.0, 3.0, 1.0, 3.0], dtype=dtype)
        assert choose(logits, 0.0, 1.0, 0.99) == 1
        assert choose(logits, 1e-3, 1.0, 0.4) == 1 and choose(logits, 1e-3, 1.0, 0.6) == 3
        assert choose(logits, 1e-300, 1.0, 0.4) == 1


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.5, 0.8)])
def test_draws_have_the_probabilities_of_the_softmax(temperature, top_p):
    """5,000 draws by counter: each token's share is within 5 standard errors of its probability; greedy is far from it."""
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -4.0, 1.9], dtype=torch.float64)
    n = 5_000
    chances = uniform(fold(7, "generate"), torch.arange(n)).tolist()
    drawn = torch.bincount(torch.tensor([choose(logits, temperature, top_p, c) for c in chances]), minlength=7) / n
    kept = kept_by(logits.tolist(), temperature, top_p)
    want = torch.tensor([kept.get(i, 0.0) for i in range(7)], dtype=torch.float64)
    want /= want.sum()
    error = (want * (1 - want) / n).sqrt()
    assert ((drawn - want).abs() <= 5 * error).all(), (drawn, want)
    assert (drawn - torch.nn.functional.one_hot(logits.argmax(), 7)).abs().max() > 0.3


# ------------------------------------------------------------------------------------------------------------ many tokens


@ranks(1, 2, 3, 4)
def test_the_ids_are_those_of_one_process_on_every_mesh(rank, world):
    """Greedy and sampled, five tokens and more on up to four ranks, also divided over tp; one process equals the naive loop."""
    want = {name: alone(n=5, **how) for name, how in (("greedy", {}), ("sampled", SAMPLED))}
    if world == 1:
        model = small(ParallelContext.single())
        assert want == {"greedy": naive(model, PROMPT, 5), "sampled": naive(model, PROMPT, 5, **SAMPLED)}
    assert want["greedy"] != want["sampled"]
    for dp, cp, tp in MESHES[world]:
        with ParallelContext.from_env(dp=dp, cp=cp, tp=tp, timeout=60) as ctx:
            for sequence_parallel in [False, True][:tp]:
                model = small(ctx, sequence_parallel=sequence_parallel)
                for name, how in (("greedy", {}), ("sampled", SAMPLED)):
                    got = list(generate(model, torch.tensor(PROMPT), ctx=ctx, max_new_tokens=5, **how))
                    assert got == want[name], (name, dp, cp, tp, sequence_parallel)


@ranks(4)
def test_fsdp_and_whole_logits_give_the_same(rank, world):
    want = alone(n=4, **SAMPLED)
    with ParallelContext.from_env(dp=2, tp=2, timeout=60) as ctx:
        assert list(generate(tpattn.shard(small(ctx), ctx), PROMPT, ctx=ctx, max_new_tokens=4, **SAMPLED)) == want
        whole = small(ctx)
        whole.head.gather_output = True
        assert list(generate(whole, PROMPT, ctx=ctx, max_new_tokens=4, **SAMPLED)) == want


@ranks(4)
def test_what_is_sent_besides_the_forward(rank, world):
    """For each token the logits of one position over tp, where it is held, and two integers from each of the other ranks."""
    with ParallelContext.from_env(cp=2, tp=2, timeout=60) as ctx:
        model = small(ctx)
        with ledger() as forward:
            padded = torch.zeros(1, 4, dtype=torch.int64)
            with torch.no_grad():
                model(padded, layout=tpattn.SequenceLayout.contiguous(8, 2))
        with ledger() as book:
            list(generate(model, PROMPT, ctx=ctx, max_new_tokens=1))
        assert book.bytes(axis="world") == 3 * 8 + 3 * 2 * 8            # asked alike, once; an id and a stop for each token
        other_half = 8 * (V - [15, 14][ctx.tp.rank])
        assert book.bytes(axis="tp") - forward.bytes(axis="tp") == (other_half if ctx.cp.rank == 1 else 0)
        assert book.bytes(axis="cp") == forward.bytes(axis="cp")


def test_a_text_that_is_handed_in_again_goes_on_as_it_would_have():
    whole = alone(n=9, **SAMPLED)
    assert whole == alone(n=4, **SAMPLED) + alone(PROMPT + whole[:4], n=5, **SAMPLED)
    assert whole != alone(n=9, **{**SAMPLED, "seed": 5})


def test_window_is_all_that_the_model_sees():
    kept = alone(PROMPT, n=1, window=3)
    assert kept == alone(PROMPT[-3:], n=1) == alone([1, 2, *PROMPT[-3:]], n=1, window=3)
    assert alone(PROMPT, n=6, window=100) == alone(PROMPT, n=6)
    assert alone(PROMPT, n=6, window=2) != alone(PROMPT, n=6)


def test_the_end_is_not_given_out_and_nothing_asked_is_nothing():
    whole = alone(n=9, **SAMPLED)
    end = whole[5]
    assert alone(n=9, end=end, **SAMPLED) == whole[: whole.index(end)]
    assert alone(n=0) == []


def test_ids_from_the_limit_on_are_never_given_out():
    """As of a vocabulary that is larger than the tokenizer's; the others are drawn as if they were all."""
    free = alone(n=30, temperature=2.0)
    limited = alone(n=30, temperature=2.0, limit=9)
    assert max(free) >= 9 > max(limited)
    ctx = ParallelContext.single()
    with torch.no_grad():
        logits = small(ctx)(torch.tensor(PROMPT)[None])[0, -1, :9].tolist()
    assert alone(n=1, limit=9) == [logits.index(max(logits))]


@ranks(2)
def test_stop_on_one_rank_ends_it_on_all(rank, world):
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        seen = []
        for token in generate(small(ctx), PROMPT, ctx=ctx, max_new_tokens=9, stop=lambda: rank == 1 and len(seen) == 4):
            seen.append(token)
        assert seen == alone(n=4)


def test_dropout_is_off_and_each_module_is_left_as_it_was():
    """Between two tokens as well: the caller may train there."""
    ctx = ParallelContext.single()
    model = small(ctx, dropout=0.5, attention_dropout=0.5)
    model.train()
    model.blocks[1].eval()
    before = [module.training for module in model.modules()]
    text = generate(model, PROMPT, ctx=ctx, max_new_tokens=9)
    got = [next(text)]
    assert [module.training for module in model.modules()] == before and torch.is_grad_enabled()
    got += text
    assert [module.training for module in model.modules()] == before
    assert got == alone(n=9)


@ranks(2)
def test_ranks_that_ask_for_different_things_are_told(rank, world):
    with ParallelContext.from_env(tp=2, timeout=60) as ctx:
        model = small(ctx)
        for other in ({"seed": rank}, {"tokens": [1, rank]}, {"max_new_tokens": 1 + rank}):
            options = {"tokens": PROMPT, "max_new_tokens": 2, "temperature": 1.0, **other}
            with pytest.raises(tpattn.CollectiveMismatch, match="rank 1 was given another prompt or other options than rank 0"):
                next(generate(model, ctx=ctx, **options))


@ranks(2)
def test_weights_that_are_no_numbers_are_told_on_every_rank(rank, world):
    with ParallelContext.from_env(cp=2, timeout=60) as ctx:
        model = small(ctx)
        with torch.no_grad():
            model.norm.weight.fill_(math.nan)
        with pytest.raises(Unsupported, match="logits are no finite numbers"):
            next(generate(model, PROMPT, ctx=ctx, max_new_tokens=2))


@ranks(1, 2)
@pytest.mark.parametrize(("options", "told"), [
    ({"tokens": []}, "the prompt has no token"),
    ({"tokens": [1, V]}, f"a token of the prompt is {V}; needed: an id from 0 to {V - 1}"),
    ({"tokens": [-1]}, "a token of the prompt is -1"),
    ({"tokens": [1.0]}, "a token of the prompt is 1.0"),
    ({"tokens": torch.zeros(2, 2, dtype=torch.int64)}, r"the prompt has the shape \[2, 2\]; needed: \[n\]"),
    ({"end": V}, f"end is {V}"),
    ({"max_new_tokens": -1}, "max_new_tokens=-1; needed: a whole number, 0 or more"),
    ({"max_new_tokens": 2.0}, "max_new_tokens=2.0"),
    ({"temperature": -0.1}, "temperature=-0.1; needed: a number from 0"),
    ({"temperature": math.nan}, "temperature=nan"),
    ({"temperature": math.inf}, "temperature=inf"),
    ({"top_p": 0.0}, "top_p=0.0; needed: more than 0, up to 1"),
    ({"top_p": 1.01}, "top_p=1.01"),
    ({"seed": 1.5}, "seed=1.5; needed: a whole number"),
    ({"window": 0}, "window=0; needed: a whole number, 1 or more"),
])
def test_wrong_values_are_refused_at_the_call_before_anything_is_sent(rank, world, options, told):
    with ParallelContext.from_env(tp=world, timeout=60) as ctx:
        model = small(ctx)
        with ledger() as book, pytest.raises(Unsupported, match=told):
            generate(model, **{"tokens": PROMPT, "max_new_tokens": 3, "ctx": ctx, **options})
        assert not book.messages


def test_a_model_of_another_context_and_what_is_no_decoder_are_refused():
    ctx = ParallelContext.single()
    with pytest.raises(Unsupported, match="another ParallelContext"):
        generate(small(ParallelContext.single()), PROMPT, ctx=ctx, max_new_tokens=1)
    with pytest.raises(Unsupported, match="Linear has no vocab_size"):
        generate(torch.nn.Linear(2, 2), PROMPT, ctx=ctx, max_new_tokens=1)

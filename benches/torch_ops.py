#!/usr/bin/env python3
"""PyTorch's eager times for the calls of `kiln bench ops --calls`.

Usage: torch_ops.py CALLS [op ...]. Prints one JSON object per call: {"call", "eager_us"}, or {"call", "error"} where
PyTorch refuses. How a row is said in PyTorch stands in crates/kiln/tests/fixtures/ops.py; here is only what would be
said otherwise where time counts, and the methods that are no rows."""
import json, math, os, pathlib, sys, time
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "crates/kiln/tests/fixtures"))
import ops  # noqa: E402

F, aten = torch.nn.functional, torch.ops.aten
ROUNDS, BLOCK, LONG = 5, 2e-3, 10e-3


def backward_of_norm(a, x):
    """Mean and 1 / deviation, which PyTorch keeps from the forward pass."""
    return list(x.shape[x.dim() - a["dims"]:])


def layer_norm_backward(a, g, x, eps):
    shape = backward_of_norm(a, x)
    _, mean, rstd = aten.native_layer_norm(x, shape, None, None, eps)
    return aten.native_layer_norm_backward(g, x, shape, mean, rstd, None, None, [True, False, False])[0]


def max_pool(a):
    return lambda x: F.max_pool2d(x, a["kernel"], a["stride"], a["padding"], a["dilation"], a["ceil_mode"], True)[1]


def drawn(draw):
    return lambda a, *numbers: draw(a["shape"], a["dtype"])


# As ops.ROWS: f(attributes, *operands). There exactness counts, here the call that a user would make.
ROWS = {
    "gelu": lambda a, x: F.gelu(x, approximate=a["approximate"] or "none"),
    "hardsigmoid": lambda a, x: F.hardsigmoid(x),
    "trigamma": lambda a, x: torch.polygamma(1, x),
    "tetragamma": lambda a, x: torch.polygamma(2, x),
    "fmod": lambda a, x, y: torch.fmod(x, y),
    "remainder": lambda a, x, y: torch.remainder(x, y),
    "any": ops.reduced(lambda x, d, k, a: torch.any(x, d, k)),
    "all": ops.reduced(lambda x, d, k, a: torch.all(x, d, k)),
    "sum": lambda a, x: torch.sum(x, a["dims"], a["keepdim"]),
    "copy": lambda a, x, src: x.clone().copy_(src) if isinstance(src, torch.Tensor) else torch.full_like(x, src),
    "argmax": lambda a, x: torch.argmax(x, a["dim"], a["keepdim"]),
    "argmin": lambda a, x: torch.argmin(x, a["dim"], a["keepdim"]),
    "topk_index": lambda a, x: torch.topk(x, a["k"], a["dim"], a["largest"]).indices,
    "median_index": lambda a, x: torch.median(x, a["dim"], a["keepdim"]).indices,
    "arange": lambda a, start, step: torch.arange(start, start + step * a["len"], step, dtype=a["dtype"])[:a["len"]],
    "as_strided": lambda a, x: torch.as_strided(x, a["view"][::2], a["view"][1::2], a["offset"]),
    "as_strided_scatter": lambda a, x, s: torch.as_strided_scatter(x, s, a["view"][::2], a["view"][1::2], a["offset"]),
    "transpose": lambda a, x: x.transpose(a["dim0"], a["dim1"]),
    "layer_norm_backward": layer_norm_backward,
    "max_pool2d_indices": lambda a, x: max_pool(a)(x),
    "avg_pool2d_backward": lambda a, g: aten.avg_pool2d_backward(
        g, torch.empty(a["input"], dtype=g.dtype), a["kernel"], a["stride"], a["padding"], a["ceil_mode"],
        a["count_include_pad"], None),
    "adaptive_avg_pool2d_backward": lambda a, g: aten._adaptive_avg_pool2d_backward(
        g, torch.empty(a["input"], dtype=g.dtype)),
    "upsample_nearest2d_backward": lambda a, g: aten.upsample_nearest2d_backward(
        g, list(g.shape[2:]), a["input"]),
    "upsample_bilinear2d_backward": lambda a, g: aten.upsample_bilinear2d_backward(
        g, list(g.shape[2:]), a["input"], a["align_corners"]),
    "convolution_input_gradient": lambda a, g, w: convolution_backward(
        a, g, torch.empty(a["input"], dtype=g.dtype), w, [True, False, False])[0],
    "convolution_weight_gradient": lambda a, x, g: convolution_backward(
        a, g, x, torch.empty(a["weight"], dtype=g.dtype), [False, True, False])[1],
    "detach": lambda a, x: x.detach(),
    "rand": drawn(lambda shape, dtype: torch.rand(shape, dtype=dtype)),
    "randn": drawn(lambda shape, dtype: torch.randn(shape, dtype=dtype)),
    "uniform": lambda a, low, high, *_: torch.empty(a["shape"], dtype=a["dtype"]).uniform_(low, high),
    "binary_cross_entropy_with_logits": lambda a, x, t, w: F.binary_cross_entropy_with_logits(
        x, t, pos_weight=ops.tensor(w), reduction="none"),
    "div_trunc": lambda a, x, y: torch.div(x, y, rounding_mode="trunc"),
    # Methods that are no rows.
    "nonzero": lambda a, x: x.nonzero(),
    "masked_select": lambda a, x, mask: x.masked_select(mask),
    "randperm": lambda a, n: torch.randperm(n),
    "sort": lambda a, x: tuple(torch.sort(x, -1)),
    "topk": lambda a, x: tuple(torch.topk(x, 8, -1)),
    "max_dim": lambda a, x: tuple(torch.max(x, 1)),
    "unique": lambda a, x: torch.unique(x),
    "stack_first": lambda a, x, y: torch.stack([x, y], 0),
    "stack_last": lambda a, x, y: torch.stack([x, y], -1),
    "roll": lambda a, x: torch.roll(x, (3, 5), (0, 1)),
    "repeat": lambda a, x: x.repeat(2, 2),
    "repeat_interleave": lambda a, x: x.repeat_interleave(4, 1),
    "heads": lambda a, x: x.permute(0, 2, 1, 3).contiguous(),
    "to_channels_last": lambda a, x: x.permute(0, 2, 3, 1).contiguous(),
    "from_channels_last": lambda a, x: x.permute(0, 3, 1, 2).contiguous(),
    "scaled_dot_product_attention": lambda a, q, k, v: F.scaled_dot_product_attention(q, k, v),
    "depthwise_3x3": lambda a, x, w: F.conv2d(x, w, padding=1, groups=32),
    "depthwise_7x7": lambda a, x, w: F.conv2d(x, w, padding=3, groups=32),
}


def convolution_backward(a, g, x, w, wanted):
    dims = len(a["stride"])
    return aten.convolution_backward(
        g, x, w, None, a["stride"], a["padding"], a["dilation"], False, [0] * dims, a["groups"], wanted)


def values(dtype, shape, domain, bounds):
    whole = lambda low, high: torch.randint(low, high, shape).to(dtype)
    if domain == "index":
        return whole(0, max(1, int(bounds[0])))
    if domain == "distinct":
        n, size = math.prod(shape), max(1, int(bounds[0]))
        return torch.randperm(size).repeat(-(-n // size))[:n].reshape(shape).to(dtype)
    if dtype == torch.bool:
        return whole(0, 2)
    if not dtype.is_floating_point:
        if domain == "positive":
            return whole(1, 5)
        if domain == "nonzero":
            return whole(1, 5) * (whole(0, 2) * 2 - 1)
        if domain == "between":
            return whole(math.ceil(bounds[0]), math.floor(bounds[1]) + 1)
        return whole(-4, 5)
    if domain == "between":
        return (torch.rand(shape) * (bounds[1] - bounds[0]) + bounds[0]).to(dtype)
    x = torch.randn(shape)
    if domain == "positive":
        x = x.abs() + 0.25
    elif domain == "nonzero":
        x = x + x.sign() * 0.25
    return x.to(dtype)


def operand(arg):
    if "number" in arg:
        return {"boolean": lambda t: t != "0", "int": int, "float": float}[arg["kind"]](arg["number"])
    dense = values(ops.DTYPES[arg["dtype"]], [arg["shape"][d] for d in arg["order"]], arg["domain"], arg["bounds"])
    return dense.permute([arg["order"].index(d) for d in range(len(arg["order"]))])


def prepared(call):
    """A function of no arguments that makes the call."""
    attributes = {k: ops.value(v) for k, v in call["attributes"].items()}
    operands = [operand(arg) for arg in call["args"]]
    name = call["op"]
    row = ROWS.get(name) or ops.ROWS.get(name) or (lambda a, *xs: getattr(torch, name)(*xs, **a))

    def forward():
        y = row(attributes, *operands)
        return y.contiguous() if call["copied"] else y

    if not call["backward"]:
        def run():
            with torch.no_grad():
                return forward()
        y = run()
    else:
        floats = [t for t in operands if isinstance(t, torch.Tensor) and t.is_floating_point()]
        for t in floats:
            t.requires_grad_()
        results = lambda y: [t for t in (y if isinstance(y, tuple) else (y,)) if t.requires_grad]
        y = forward()
        weights = [torch.randn_like(t.detach()) for t in results(y)]

        def run():
            return torch.autograd.grad(results(forward()), floats, weights, allow_unused=True)
    if call["result"] is not None and list(y.shape) != call["result"]:
        raise ValueError(f"{name}: another shape than Kiln's")
    return run


def block(f, calls):
    start = time.perf_counter()
    for _ in range(calls):
        f()
    return (time.perf_counter() - start) / calls


def quickest_us(f):
    """As `kiln bench ops`: the quickest of some blocks of two milliseconds, fewer for long calls."""
    first = block(f, 1)
    is_long = first > LONG
    if not is_long:
        block(f, 2)
    calls = 1
    while (took := block(f, calls) * calls) < BLOCK:
        calls = int(calls * min(10.0, max(2.0, BLOCK / max(took, 1e-9) * 1.2)))
    return min(block(f, calls) for _ in range(3 if is_long else ROUNDS)) * 1e6


def main():
    torch.set_num_threads(int(os.environ.get("KILN_NUM_THREADS", os.cpu_count())))
    calls = [json.loads(line) for line in pathlib.Path(sys.argv[1]).read_text().splitlines()]
    calls = [call for call in calls if len(sys.argv) < 3 or call["op"] in sys.argv[2:]]
    for done, call in enumerate(calls):
        if sys.stderr.isatty():
            print(f"\r{done}/{len(calls)}  {call['call'][:90]:90}", end="", file=sys.stderr)
        torch.manual_seed(0)
        try:
            line = {"call": call["call"], "eager_us": quickest_us(prepared(call))}
        except Exception as error:  # PyTorch refuses the call.
            line = {"call": call["call"], "error": f"{call['op']}: {str(error).splitlines()[0][:100]}"}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

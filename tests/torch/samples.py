#!/usr/bin/env python3
"""Writes what PyTorch computes for samples of its operators, for Kiln's runner (src/main.rs) to compare.

Usage: samples.py FOLDER NAMES [JOBS]. NAMES is a file with one name of an OpInfo a line. For each, FOLDER gets
<name>.jsonl, a call a line, and <name>.bin, the bytes of its tensors. Files of this script and this PyTorch are
kept. A call has its arguments, the outputs, gradients and second gradients, and the same computed in float64."""
import hashlib
import itertools
import json
import math
import multiprocessing
import pathlib
import sys
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, SampleInput, UnaryUfuncInfo

DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
          "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8,
          "bool": torch.bool}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
MOST_ELEMENTS = 20_000  # of a call's tensors together
MOST_SAMPLES = 60  # of one dtype of one op, of each kind
INFINITY = math.inf
# What float arithmetic treats in a way of its own; f16 has fewer of them, by rounding.
SPECIAL = [math.nan, INFINITY, -INFINITY, 0.0, -0.0, 1e-40, -1e-40, 1e-7, 6.5e4, -6.5e4, 3e38, -3e38, 1.0, -1.0,
           0.5, -0.5, 1.5, 2.5, 88.0, -88.0, 100.0, -100.0]
MAGNITUDES = [1e-4, 1e-2, 1e2, 1e3, 6e4]
NUMBERS = [True, 3, -5, 300, 70_000, 2.5, -0.75]
# PyTorch's gradient of these is wrong: it goes to the elements that were replaced.
WRONG_GRADIENTS = ["as_strided_scatter"]
THREE = ["where", "addcmul", "addcdiv", "lerp", "clamp"]


class Unsaid(Exception):
    """A call that the format has no words for."""


def leaves(x):
    """The tensors in a nest of arguments, in order."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from leaves(y)
    elif isinstance(x, dict):
        for y in x.values():
            yield from leaves(y)


def mapped(f, x):
    """The nest with f applied to its tensors and dtypes."""
    if isinstance(x, (torch.Tensor, torch.dtype)):
        return f(x)
    if isinstance(x, (list, tuple)) and not isinstance(x, torch.Size):
        return type(x)(mapped(f, y) for y in x) if not hasattr(x, "_fields") else [mapped(f, y) for y in x]
    if isinstance(x, dict):
        return {k: mapped(f, y) for k, y in x.items()}
    return x


class Writer:
    """The two files of an op."""

    def __init__(self, folder, name):
        self.paths = [folder / f"{name}.jsonl", folder / f"{name}.bin"]
        self.lines, self.bytes = [], bytearray()

    def tensor(self, t):
        if t.dtype not in NAMES or t.layout != torch.strided:
            raise Unsaid(f"a tensor of {t.dtype}")
        t = t.detach()
        length = 0 if t.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
        flat = t.as_strided((length,), (1,), t.storage_offset()).contiguous()
        start = len(self.bytes)
        self.bytes += flat.view(torch.uint8).numpy().tobytes() if length else b""
        return {"dtype": NAMES[t.dtype], "shape": list(t.shape), "strides": list(t.stride()), "at": start}

    def value(self, x):
        if isinstance(x, torch.Tensor):
            return {"tensor": self.tensor(x)}
        if x is None or isinstance(x, (bool, str)):
            return x
        if isinstance(x, int):
            if not -2**63 <= x < 2**63:
                raise Unsaid("an integer beyond i64")
            return x
        if isinstance(x, float):
            return x if math.isfinite(x) else {"float": str(x)}
        if isinstance(x, torch.dtype):
            if x not in NAMES:
                raise Unsaid(f"the dtype {x}")
            return {"dtype": NAMES[x]}
        if isinstance(x, slice):
            return {"slice": [self.value(y) for y in (x.start, x.stop, x.step)]}
        if x is Ellipsis:
            return {"ellipsis": True}
        if isinstance(x, (list, tuple)):
            return [self.value(y) for y in x]
        raise Unsaid(f"an argument of type {type(x).__name__}")

    def close(self):
        for path, data in zip(self.paths[::-1], [bytes(self.bytes), "".join(l + "\n" for l in self.lines).encode()]):
            part = path.with_suffix(path.suffix + ".part")
            part.write_bytes(data)
            part.replace(path)


def weight(y):
    """What an output is multiplied with before gradients are taken: different for neighbours, exact in every dtype."""
    return ((torch.arange(y.numel()) * 5 % 7 - 2.5) / 4).to(y.dtype).reshape(y.shape)


def pulled(outputs, inputs):
    """Gradients of the weighted outputs that have any."""
    outputs = [y for y in outputs if y is not None and y.requires_grad]
    if not outputs or not inputs:
        return None
    return torch.autograd.grad(outputs, inputs, [weight(y) for y in outputs], create_graph=True, allow_unused=True)


def called(f, call, second, wide):
    """Outputs, gradients and second gradients of a call; in float64 if wide."""
    def fresh(t):
        if isinstance(t, torch.dtype):
            return torch.float64 if wide and t.is_floating_point else t
        t = t.detach()
        if wide and t.is_floating_point():
            # Layouts are for values; how float64 lies is of no account.
            t = t.double()
        elif t.numel() < 4096:
            # Inputs that the op changes must not be those that are written.
            t = t.clone() if t.is_contiguous() or 0 in t.stride() else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t)
        return t
    args, kwargs = mapped(fresh, call)
    inputs = [t for t in leaves((args, kwargs)) if t.is_floating_point()]
    if second is not None:
        for t in inputs:
            t.requires_grad_()
    given = f(*args, **kwargs)
    outputs = [given] if not isinstance(given, (list, tuple)) else list(given)
    outputs = [torch.tensor(y) if isinstance(y, (bool, int, float)) else y for y in outputs]
    if not all(isinstance(y, torch.Tensor) for y in outputs):
        raise Unsaid("an output that is no tensor")
    if second is None:
        return outputs, None, None
    first = pulled(outputs, inputs)
    again = pulled(first, inputs) if first and second else None
    return outputs, first, again


def write(writer, name, f, kind, dtype, args, kwargs, gradients, refused, form=""):
    if name == "__getitem__" and isinstance(args[1], list):
        # A list stands for a tensor there; in the files it would read as a tuple.
        args = (args[0], torch.tensor(args[1]), *args[2:])
    call = (list(args), dict(kwargs))
    tensors = list(leaves(call))
    if sum(t.numel() for t in tensors) > MOST_ELEMENTS:
        refused["more elements than a sample may have"] += 1
        return
    mark = len(writer.bytes)
    try:
        line = {"op": name, "kind": kind, "form": form, "dtype": NAMES[dtype],
                "args": [writer.value(x) for x in call[0]], "kwargs": [[k, writer.value(x)] for k, x in call[1].items()]}
        floats = any(t.is_floating_point() for t in tensors)
        # Second derivatives at infinities are inf · 0 of whatever formula one has: not compared.
        twice = dtype in (torch.float64, torch.float32) and kind != "special"
        second = twice if gradients and floats else None
        try:
            results = called(f, call, second, False)
        except Unsaid:
            raise
        except Exception as error:
            if second is None:
                raise
            if "not implemented" not in str(error) and "not differentiable" not in str(error):
                raise
            second, results = None, called(f, call, None, False)
        refs = lambda ts: None if ts is None else [None if t is None else writer.tensor(t) for t in ts]
        line["outputs"], line["gradients"], line["seconds"] = map(refs, results)
        if floats and dtype != torch.float64:
            try:
                exact = called(f, call, second, True)
                line["exact"] = [refs(x) for x in exact]
            except Exception:
                line["exact"] = None
        if sum(t.numel() for t in results[0]) > MOST_ELEMENTS:
            raise Unsaid("more elements than a sample may have")
        writer.lines.append(json.dumps(line, separators=(",", ":")))
    except Unsaid as why:
        del writer.bytes[mark:]
        refused[str(why)] += 1
    except Exception as error:
        del writer.bytes[mark:]
        refused["PyTorch refuses it"] += 1
        del error


def laid_out(how):
    """The same values lying otherwise in memory; expanded: one element of each row, with stride 0."""
    def f(t):
        if isinstance(t, torch.dtype) or t.dim() == 0:
            return t
        if how == "transposed":
            order = list(range(t.dim()))[::-1]
            return t.permute(order).contiguous().permute(order)
        if how == "sliced":
            wide = torch.stack([t, torch.ones_like(t)], dim=-1).flatten(-2)
            return wide[..., ::2]
        return t[..., :1].expand(t.shape) if t.shape[-1] else t
    return f


def filled_special(offset):
    count = itertools.count(offset)
    def f(t):
        if isinstance(t, torch.dtype) or not t.is_floating_point():
            return t
        step = next(count)
        values = [SPECIAL[(i * (2 * step + 1) + step * 5) % len(SPECIAL)] for i in range(t.numel())]
        return torch.tensor(values, dtype=torch.float64).to(t.dtype).reshape(t.shape)
    return f


def scaled(magnitude):
    def f(t):
        if isinstance(t, torch.dtype) or not t.is_floating_point() or t.numel() == 0:
            return t
        most = t.double().abs().max().item()
        return (t.double() * (magnitude / most)).to(t.dtype) if most > 0 and math.isfinite(most) else t
    return f


def varied(args, kwargs, f):
    return mapped(f, list(args)), mapped(f, dict(kwargs))


def small(tensors):
    return sum(t.numel() for t in tensors) <= 2000


def spread(samples, most):
    """At most so many, from the whole list."""
    samples = list(samples)
    return samples if len(samples) <= most else [samples[i * len(samples) // most] for i in range(most)]


def promotions(writer, name, op, f, refused):
    """Every pair of dtypes, and every dtype with numbers, some of which it can't hold."""
    ternary = op.name in THREE
    rounding = {"floor_rounding": "floor", "trunc_rounding": "trunc"}.get(op.variant_test_name)
    kwargs = {"rounding_mode": rounding} if rounding else {}
    for left, right in itertools.product(DTYPES.values(), repeat=2):
        x = torch.tensor([[0, 1, 2, 3], [5, 100, 77, 1]]).to(left)
        y = torch.tensor([1, 2, 3, 60]).to(right)
        if op.name == "where":
            c = torch.tensor([True, False, True, True])
            calls = [(x, c, y), (x, c, y[1])]
        elif ternary:
            calls = [(x, y, y), (x, y, x)]
        else:
            calls = [(x, y), (x, y[2])]
        for args in calls:
            write(writer, name, f, "promotion", left, args, kwargs, False, refused)
    for dtype, number in itertools.product(DTYPES.values(), NUMBERS):
        x = torch.tensor([[0, 1, 2, 3], [5, 100, 77, 1]]).to(dtype)
        if op.name == "where":
            args = (x, torch.tensor([True, False, True, True]), number)
        elif op.name == "clamp":
            args = (x, -1, number)
        elif op.name in ("addcmul", "addcdiv"):
            write(writer, name, f, "number", dtype, (x, x, x + 1 if dtype != torch.bool else x), {"value": number}, False, refused)
            continue
        elif op.name == "lerp":
            args = (x, x * 2, number)
        else:
            args = (x, number)
        write(writer, name, f, "number", dtype, args, kwargs, False, refused)


NUMBERED = ["clamp_min", "clamp_max", "masked_fill", "fill", "full_like", "index_fill", "nn.functional.hardtanh",
            "nn.functional.threshold", "constant_pad_nd"]


def numbers(writer, name, op, f, refused):
    """Ops other than arithmetic whose arguments are numbers: each dtype with numbers it may not hold."""
    for dtype, number in itertools.product(DTYPES.values(), NUMBERS):
        x = torch.tensor([[0, 1, 2, 3], [5, 100, 77, 1]]).to(dtype)
        args = {
            "masked_fill": (x, torch.tensor([True, False, True, False]), number),
            "index_fill": (x, 1, torch.tensor([0, -1]), number),
            "nn.functional.hardtanh": (x, -1, number),
            "nn.functional.threshold": (x, 2, number),
            "constant_pad_nd": (x, [1, 1], number),
        }.get(op.name, (x, number))
        write(writer, name, f, "number", dtype, args, {}, False, refused)


def op_file(job):
    folder, name, stamp = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    op = next(o for o in op_db if full_name(o) == name)
    path = folder / f"{name}.stamp"
    if path.exists() and path.read_text() == stamp:
        return
    writer, refused = Writer(folder, name), Counts()
    f = op.get_op()
    supported = set(op.supported_dtypes("cpu"))
    for dtype in DTYPES.values():
        if dtype not in supported:
            continue
        torch.manual_seed(0)
        gradients = op.supports_autograd and dtype.is_floating_point and op.name not in WRONG_GRADIENTS
        try:
            samples = [(s.input, s.args, s.kwargs) for s in op.sample_inputs("cpu", dtype, requires_grad=False)]
        except Exception as error:
            refused[f"OpInfo has no samples of {NAMES[dtype]}: {type(error).__name__}"] += 1
            continue
        samples = [((x, *args), kwargs) for x, args, kwargs in samples]
        for args, kwargs in spread(samples, MOST_SAMPLES):
            write(writer, name, f, "opinfo", dtype, args, kwargs, gradients, refused)
        try:
            more = [((s.input, *s.args), s.kwargs) for s in op.reference_inputs("cpu", dtype, requires_grad=False)]
        except Exception:
            more = []
        more = [(a, k) for a, k in more if small(leaves((a, k)))]
        if len(more) > len(samples):
            for args, kwargs in spread(more, 24):
                write(writer, name, f, "reference", dtype, args, kwargs, gradients, refused)
        own = [(a, k) for a, k in samples if small(leaves((a, k)))]
        layouts = 8 if dtype in (torch.float32, torch.int64) else 3
        for how in ["transposed", "sliced", "expanded"]:
            if how == "expanded" and op.name == "nn.functional.batch_norm":
                continue  # it changes its running statistics, which may not share memory
            several = [(a, k) for a, k in own if any(t.dim() > 0 for t in leaves((a, k)))]
            for args, kwargs in spread(several, layouts):
                args, kwargs = varied(args, kwargs, laid_out(how))
                write(writer, name, f, "layout", dtype, args, kwargs, gradients, refused, how)
        if dtype.is_floating_point:
            for number, (args, kwargs) in enumerate(spread(own, 4)):
                args, kwargs = varied(args, kwargs, filled_special(number))
                write(writer, name, f, "special", dtype, args, kwargs, gradients, refused)
            if dtype != torch.float64:
                for magnitude in MAGNITUDES:
                    for args, kwargs in spread(own, 4):
                        args, kwargs = varied(args, kwargs, scaled(magnitude))
                        write(writer, name, f, "magnitude", dtype, args, kwargs, gradients, refused, str(magnitude))
    if isinstance(op, BinaryUfuncInfo) or op.name in THREE:
        promotions(writer, name, op, f, refused)
    elif op.name in NUMBERED:
        numbers(writer, name, op, f, refused)
    (folder / f"{name}.refused.json").write_text(json.dumps(dict(refused)))
    writer.close()
    path.write_text(stamp)


class Counts(dict):
    def __missing__(self, key):
        return 0


def full_name(op):
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def main():
    folder, names = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]).read_text().split()
    jobs = int(sys.argv[3]) if len(sys.argv) > 3 else 2
    folder.mkdir(parents=True, exist_ok=True)
    there = {full_name(op) for op in op_db}
    # A name may be one of torch or of torch.nn.functional: the other one is not missed.
    known = {name.removeprefix("nn.functional.") for name in names if name in there}
    missing = sorted({name.removeprefix("nn.functional.") for name in names} - known)
    if missing:
        print(f"this PyTorch ({torch.__version__}) has no OpInfo of: {' '.join(missing)}")
    stamp = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest() + " " + torch.__version__
    (folder / "unmapped.json").write_text(json.dumps(sorted(there - set(names))))
    work = [(folder, name, stamp) for name in names if name in there]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for done, _ in enumerate(pool.imap_unordered(op_file, work, chunksize=1), 1):
            if done % 50 == 0 or done == len(work):
                print(f"{done} of {len(work)} operators", flush=True)


if __name__ == "__main__":
    main()

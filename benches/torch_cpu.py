#!/usr/bin/env python3
"""PyTorch on the CPU for Kiln's benchmark cases. Prints one JSON object per case:
{"case", "eager_us", "compiled_us", "first_call_s"}, for Adam and AdamW also "fused_us" (fused=True, eager);
compiled_us and first_call_s are null where only eager is compared. For gpt_train and networks over pictures also
"rss_bytes_eager" and "rss_bytes_compiled": the most resident memory during steps, above the process with its model,
in processes of their own. Usage: torch_cpu.py [case ...]"""
import json, statistics, subprocess, sys, time
import torch
F, O = torch.nn.functional, torch.optim

def median_us(f, n, warm=3):
    for _ in range(warm): f()
    ts = []
    for _ in range(n):
        t = time.perf_counter(); f(); ts.append((time.perf_counter() - t) * 1e6)
    return statistics.median(ts)

def run(case, make, n, fused=None, compiled=True):
    torch._dynamo.reset(); torch.manual_seed(0)
    row = dict(case=case, eager_us=median_us(make(lambda f: f), n), compiled_us=None, first_call_s=None)
    if fused: row["fused_us"] = median_us(fused(lambda f: f), n)
    if compiled:
        torch._dynamo.reset(); torch.manual_seed(0)
        step = make(torch.compile)
        t = time.perf_counter(); step(); row["first_call_s"] = time.perf_counter() - t
        row["compiled_us"] = median_us(step, n)
    if case == "gpt_train" or CASES[case][0].__qualname__.startswith("network"):
        for how in ("eager", "compiled"):
            row[f"rss_bytes_{how}"] = int(subprocess.check_output([sys.executable, __file__, "--memory", case, how]).split()[-1])
    print(json.dumps(row), flush=True)

def status(name):
    """A line of the process's status, in bytes."""
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

def memory(case, how):
    """The peak of three steps behind two others, above what there was before the first; the compiler's leftovers count."""
    torch.manual_seed(0)
    step = CASES[case][0](torch.compile if how == "compiled" else lambda f: f)
    before = status("VmRSS:")
    for steps in (2, 3):
        with open("/proc/self/clear_refs", "w") as f: f.write("5")
        for _ in range(steps): step()
    print(max(0, status("VmHWM:") - before))

def optimizer(n, d, make_opt):
    def make(comp):
        m = torch.nn.Sequential(*[torch.nn.Linear(d, d, False) for _ in range(n)])
        m(torch.rand(d)).sum().backward()
        opt = make_opt(m.parameters())
        return comp(lambda: opt.step())
    return make

def mlp(comp):
    m = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 10))
    opt, cm = O.Adam(m.parameters()), comp(m)
    x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
    def step(): opt.zero_grad(); F.cross_entropy(cm(x), y).backward(); opt.step()
    return step

def lstm(steps):
    def make(comp):
        m = torch.nn.LSTM(128, 256, 2)
        opt, cm = O.Adam(m.parameters()), comp(m)
        x = torch.randn(steps, 16, 128)
        def step(): opt.zero_grad(); y, _ = cm(x); (y * y).mean().backward(); opt.step()
        return step
    return make

def gpt(dtype, texts):
    def make(comp):
        from transformers import GPT2Config, GPT2LMHeadModel
        m = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=8192, bos_token_id=0, eos_token_id=0, attn_pdrop=0., embd_pdrop=0., resid_pdrop=0.)).to(dtype)
        opt, cm = O.AdamW(m.parameters(), lr=1e-4), comp(m)
        ids = torch.randint(0, 8192, (texts, 128))
        def step(): opt.zero_grad(); cm(input_ids=ids, labels=ids, use_cache=False).loss.backward(); opt.step()
        return step
    return make

def transformer(comp):
    """Twelve pre-norm blocks of width 256 with 4 heads on 4 x 128 tokens, learning the next of 1024 words."""
    nn = torch.nn
    class Block(nn.Module):
        def __init__(self, d, heads):
            super().__init__()
            self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
            self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        def forward(self, x):
            b, t, d = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(b, t, d))
            return x + self.down(F.gelu(self.up(self.norm2(x))))
    class Transformer(nn.Module):
        def __init__(self, layers, d, heads, words, length):
            super().__init__()
            self.words, self.places = nn.Embedding(words, d), nn.Embedding(length, d)
            self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, words, False)
        def forward(self, words, following):
            x = self.words(words) + self.places.weight
            for block in self.blocks: x = block(x)
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits.view(-1, logits.shape[-1]), following.view(-1))
    m = Transformer(12, 256, 4, 1024, 128)
    opt, cm = O.AdamW(m.parameters(), lr=1e-4), comp(m)
    words, following = torch.randint(0, 1024, (4, 128)), torch.randint(0, 1024, (4, 128))
    def step(): opt.zero_grad(); cm(words, following).backward(); opt.step()
    return step

def network(name, batch, pixels):
    def make(comp):
        import torchvision
        m = getattr(torchvision.models, name)(); opt, cm = O.SGD(m.parameters(), lr=0.01), comp(m)
        x = torch.randn(batch, 3, pixels, pixels)
        def step(): opt.zero_grad(); cm(x).sum().backward(); opt.step()
        return step
    return make

def resnet_latency(comp):
    import torchvision
    m = comp(torchvision.models.resnet18().eval())
    x = torch.randn(1, 3, 224, 224)
    @torch.no_grad()
    def step(): return m(x)
    return step

def gpt_latency(comp):
    """The next token of the character GPT behind 128 others, 127 of them in the cache."""
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, StaticCache
    config = GPT2Config(n_layer=4, n_embd=128, n_head=4, n_positions=128, vocab_size=128, bos_token_id=0, eos_token_id=0, attn_pdrop=0., embd_pdrop=0., resid_pdrop=0.)
    m = GPT2LMHeadModel(config).eval()
    ids, compiled = torch.randint(0, 128, (1, 128)), comp is torch.compile
    # Each as its mode likes it best: a cache that grows in eager mode, one of a fixed size when compiled.
    cache = StaticCache(config=config, max_cache_len=128) if compiled else DynamicCache(config=config)
    with torch.no_grad(): m(ids[:, :127], past_key_values=cache)
    last, cm = ids[:, 127:].clone(), comp(m)
    @torch.no_grad()
    def step():
        logits = cm(last, past_key_values=cache).logits[:, -1]
        # The token that came in goes out again: each call is the same one.
        if compiled:
            for layer in cache.layers: layer.cumulative_length.fill_(127)
        else: cache.crop(-1)
        return logits
    return step

def gpt_growing(comp):
    """The same model without a cache: a text that grows by a character in every call."""
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(n_layer=4, n_embd=128, n_head=4, n_positions=128, vocab_size=128, bos_token_id=0, eos_token_id=0, attn_pdrop=0., embd_pdrop=0., resid_pdrop=0.)
    m = comp(GPT2LMHeadModel(config).eval())
    ids, calls = torch.randint(0, 128, (1, 128)), [0]
    @torch.no_grad()
    def step():
        length = 16 + calls[0] % 112
        calls[0] += 1
        return m(ids[:, :length].contiguous(), use_cache=False).logits[:, -1]
    return step

def micro(f):
    def make(comp):
        x = torch.randn(4096, 1024); g = comp(f)
        return lambda: g(x)
    return make

def matmul(m, k, n):
    def make(_):
        a, b = torch.rand(m, k), torch.rand(k, n)
        return lambda: a @ b
    return make

def convs(_):
    """Forward and backward of every convolution of ResNet18 at batch 8, 112x112."""
    shapes = [(3, 64, 7, 2, 112)] + [(64, 64, 3, 1, 28)] * 4
    for i, o, px in ((64, 128, 28), (128, 256, 14), (256, 512, 7)):
        shapes += [(i, o, 3, 2, px), (i, o, 1, 2, px)] + [(o, o, 3, 1, (px + 1) // 2)] * 3
    layers = [(torch.randn(8, i, px, px, requires_grad=True), torch.randn(o, i, k, k, requires_grad=True), s, k // 2) for i, o, k, s, px in shapes]
    def step():
        for x, w, s, p in layers: F.conv2d(x, w, stride=s, padding=p).sum().backward()
    return step

def op_overhead(_):
    a, b = torch.rand(1, requires_grad=True), torch.rand(1)
    def step():
        for _ in range(1000): a + b
    return step

CASES = {
    "adam_10x1024": (optimizer(10, 1024, lambda p: O.Adam(p, lr=0.01)), 15, optimizer(10, 1024, lambda p: O.Adam(p, lr=0.01, fused=True))),
    "adamw_10x1024": (optimizer(10, 1024, lambda p: O.AdamW(p, lr=0.01)), 15, optimizer(10, 1024, lambda p: O.AdamW(p, lr=0.01, fused=True))),
    "sgd_momentum_10x1024": (optimizer(10, 1024, lambda p: O.SGD(p, lr=0.01, momentum=0.9)), 15),
    "mlp_train": (mlp, 50),
    "lstm_train_50": (lstm(50), 30, None, False), "lstm_train_200": (lstm(200), 10, None, False), "lstm_train_400": (lstm(400), 7, None, False),
    "softmax_4096x1024": (micro(lambda x: F.softmax(x, -1)), 20),
    "ln_gelu_4096x1024": (micro(lambda x: F.gelu(F.layer_norm(x, (1024,)) * 2 + 1)), 20),
    "chain10_4096x1024": (micro(lambda x: ((((x * 2 + 1).tanh() * x).sigmoid() + x).exp() - 1).relu().sqrt() * 0.5 + x), 20),
    "sum0_4096x1024": (micro(lambda x: (x * x).sum(0)), 20),
    "gpt_train": (gpt(torch.float32, 4), 10),
    "gpt_train_bf16": (gpt(torch.bfloat16, 8), 10),
    "transformer_train": (transformer, 10),
    "resnet18_train": (network("resnet18", 8, 112), 10),
    "mobilenet_v2_train": (network("mobilenet_v2", 16, 112), 10),
    "efficientnet_b0_train": (network("efficientnet_b0", 16, 112), 10),
    "convnext_tiny_train": (network("convnext_tiny", 8, 64), 10),
    "resnet18_latency": (resnet_latency, 50),
    "gpt_latency": (gpt_latency, 300),
    "gpt_growing": (gpt_growing, 224),
    "matmul_2048": (matmul(2048, 2048, 2048), 20, None, False),
    "matmul_512x256x8192": (matmul(512, 256, 8192), 20, None, False),
    "matmul_512x576x3136": (matmul(512, 576, 3136), 20, None, False),
    "matmul_64x256x256": (matmul(64, 256, 256), 200, None, False),
    "conv_resnet18": (convs, 10, None, False),
    "op_overhead_x1000": (op_overhead, 30, None, False),  # 1,000 additions of 1-element tensors with gradient recording
}
if sys.argv[1:2] == ["--memory"]: memory(*sys.argv[2:])
else:
    for name in sys.argv[1:] or CASES: run(name, *CASES[name])

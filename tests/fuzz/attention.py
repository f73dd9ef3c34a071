"""Attention in the ways that people write it, and experts."""

from __future__ import annotations

from .pieces import Lines, Sizes, lines, piece

PROJECTIONS = ("separate", "fused", "fused view", "interleaved", "latent")
SCORES = ("sdpa", "causal", "matmul", "masked", "additive", "einsum", "sinks", "capped")
NORMED = ("none", "heads", "whole", "shared scale")
LAYOUTS = ("transpose", "permute", "length first")


def _projected(p: str, s: Sizes, projection: str, kv: int, bias: bool) -> tuple[str, str]:
    """What makes q, k and v of x, as [batch, length, heads * size] each."""
    w, k = s.width, kv * s.size
    fused = f"self.{p}_qkv = nn.Linear({w}, {w + 2 * k}, bias={bias})"
    views = f"q, k, v = h[..., :{w}], h[..., {w}:{w + k}], h[..., {w + k}:]"
    if projection == "separate":
        made = [f"self.{p}_{n} = nn.Linear({w}, {out}, bias={bias})" for n, out in (("q", w), ("k", k), ("v", k))]
        return "\n".join(made), f"q, k, v = self.{p}_q(x), self.{p}_k(x), self.{p}_v(x)"
    if projection == "fused":
        return fused, f"q, k, v = self.{p}_qkv(x).split([{w}, {k}, {k}], -1)"
    if projection == "fused view":
        return fused, f"h = self.{p}_qkv(x)\n{views}"
    if projection == "interleaved":  # [kv heads, queries of it + k + v, size]
        per = s.heads // kv
        split = f"h = self.{p}_qkv(x).view(*x.shape[:2], {kv}, {per + 2}, {s.size})"
        return (
            fused,
            f"{split}\nq, k, v = h[..., :{per}, :].flatten(2), h[..., {per}, :].flatten(2), h[..., -1, :].flatten(2)",
        )
    return (
        f"""self.{p}_down = nn.Linear({w}, 5, bias={bias})
        self.{p}_mid = nn.RMSNorm(3)
        self.{p}_q, self.{p}_kv = nn.Linear({w}, {w}), nn.Linear(3, {2 * k})
        self.{p}_rope = nn.Linear(2, {k})""",
        f"""low, rope = self.{p}_down(x).split([3, 2], -1)
        k, v = self.{p}_kv(self.{p}_mid(low)).chunk(2, -1)
        q, k = self.{p}_q(x), k + self.{p}_rope(rope)""",
    )


def _normed(p: str, s: Sizes, kv: int, normed: str) -> tuple[str, str]:
    """Norms of q and k, before they are viewed as heads, or of each head."""
    if normed == "whole":
        made = f"self.{p}_qn, self.{p}_kn = nn.RMSNorm({s.width}), nn.RMSNorm({kv * s.size})"
        return made, f"q, k = self.{p}_qn(q), self.{p}_kn(k)"
    if normed == "none":
        return "", ""
    used = {
        "heads": f"""q = self.{p}_qn(q.unflatten(-1, ({s.heads}, -1))).flatten(2)
        k = self.{p}_kn(k.unflatten(-1, ({kv}, -1))).flatten(2)""",
        "shared scale": f"q = (q.unflatten(-1, ({s.heads}, -1)) * self.{p}_qn.weight).flatten(2)",
    }[normed]
    return f"self.{p}_qn, self.{p}_kn = nn.RMSNorm({s.size}), nn.RMSNorm({s.size})", used


SCORED = {
    "sdpa": "o = F.scaled_dot_product_attention(q, k, v)",
    "causal": "o = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
    "matmul": "o = torch.matmul((q @ k.transpose(-1, -2) / {d} ** 0.5).softmax(-1), v)",
    "masked": """mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        o = (q @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ v""",
    "additive": """bias = self.{p}_slope.view(1, -1, 1, 1) * torch.arange(x.shape[1]).sub(3)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)""",
    "einsum": "o = torch.einsum('bhqk,bhkd->bhqd', torch.einsum('bhqd,bhkd->bhqk', q, k).softmax(-1), v)",
    "sinks": """a = torch.cat([q @ k.mT, self.{p}_slope.view(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[1], 1)], -1)
        o = a.softmax(-1)[..., :-1] @ v""",
    "capped": "o = (torch.tanh(q @ k.mT / 5) * 5).float().softmax(-1).to(v.dtype) @ v",
}


def _heads(s: Sizes, kv: int, layout: str, rope: bool, repeat: str) -> str:
    """q, k and v as [batch, heads, length, size]."""
    views = {
        "transpose": "{n} = {n}.view(*x.shape[:2], {h}, {d}).transpose(1, 2)",
        "permute": "{n} = {n}.reshape(x.shape[0], -1, {h}, {d}).permute(0, 2, 1, 3)",
        "length first": """{n} = {n}.transpose(0, 1).reshape(x.shape[1], -1, {d}).transpose(0, 1)
        {n} = {n}.view(x.shape[0], {h}, -1, {d})""",
    }
    text = [views[layout].format(n=n, h=h, d=s.size) for n, h in (("q", s.heads), ("k", kv), ("v", kv))]
    if rope and s.size % 2 == 0:
        text.append(f"a = torch.arange(x.shape[1])[:, None] / torch.arange(1, {s.size // 2 + 1})")
        text.append("c, n = torch.cat([a.cos(), a.cos()], -1), torch.cat([a.sin(), a.sin()], -1)")
        for name in ("q", "k"):
            turned = f"torch.cat([-{name}[..., {s.size // 2}:], {name}[..., :{s.size // 2}]], -1)"
            text.append(f"{name} = {name} * c + {turned} * n")
    if kv != s.heads:
        per = s.heads // kv
        text += [
            f"{n} = {n}.repeat_interleave({per}, 1)"
            if repeat == "interleave"
            else f"{n} = {n}[:, :, None].expand(-1, -1, {per}, -1, -1).reshape(x.shape[0], {s.heads}, -1, {s.size})"
            for n in ("k", "v")
        ]
    return "\n".join(text)


@piece(
    projection=PROJECTIONS, score=SCORES, normed=NORMED, layout=LAYOUTS, grouped=("no", "one", "two"),
    rope=(False, True), gate=(False, True), bias=(False, True), repeat=("expand", "interleave"),
)  # fmt: skip
def attention(
    p: str, s: Sizes, projection: str, score: str, normed: str, layout: str, grouped: str, rope: bool, gate: bool,
    bias: bool, repeat: str,
) -> Lines:  # fmt: skip
    kv = {"no": s.heads, "one": 1, "two": 2 if s.heads % 2 == 0 else s.heads}[grouped]
    made, projected = _projected(p, s, projection, kv, bias)
    norms, normalised = _normed(p, s, kv, normed)
    gated = f"o = o * torch.sigmoid(self.{p}_gate(x))" if gate else ""
    return lines(
        f"""{made}
        {norms}
        {f"self.{p}_slope = nn.Parameter(torch.ones({s.heads}))" if score in ("additive", "sinks") else ""}
        {f"self.{p}_gate = nn.Linear({s.width}, {s.width})" if gate else ""}
        self.{p}_o = nn.Linear({s.width}, {s.width}, bias={bias})""",
        f"""{projected}
        {normalised}
        {_heads(s, kv, layout, rope, repeat)}
        {SCORED[score].format(p=p, d=s.size)}
        o = o.transpose(1, 2).reshape(x.shape[0], x.shape[1], {s.width})
        {gated}
        x = x + self.{p}_o(o)""",
    )


@piece(batch_first=(True, False), bias=(True, False))
def multihead(p: str, s: Sizes, batch_first: bool, bias: bool) -> Lines:
    made = f"nn.MultiheadAttention({s.width}, {s.heads}, bias={bias}, batch_first={batch_first})"
    h, back = ("x", "o") if batch_first else ("x.transpose(0, 1)", "o.transpose(0, 1)")
    return lines(f"self.{p}_mha = {made}", f"h = {h}\no = self.{p}_mha(h, h, h, need_weights=False)[0]\nx = x + {back}")


ROUTED = {
    "dense": """u = torch.relu(torch.einsum('btw,ewm->betm', x, self.{p}_up))
        o = torch.einsum('betm,emw,bte->btw', u, self.{p}_down, g)""",
    "loop": """o = torch.zeros_like(x)
        for e in range({n}):
        ____o = o + g[..., e, None] * (torch.relu(x @ self.{p}_up[e]) @ self.{p}_down[e])""",
    "bmm": """h = x.reshape(1, -1, {w}).expand({n}, -1, -1)
        u = torch.relu(torch.bmm(h, self.{p}_up) + self.{p}_bias[:, None])
        o = (torch.bmm(u, self.{p}_down) * g.reshape(-1, {n}).t()[..., None]).sum(0).view_as(x)""",
    "gathered": """o = 0
        for i in range({k}):
        ____u = torch.relu(torch.einsum('btw,btwm->btm', x, self.{p}_up[top[..., i]]))
        ____o = o + g.gather(-1, top[..., i:i + 1]) * torch.einsum('btm,btmw->btw', u, self.{p}_down[top[..., i]])""",
    "grouped": """order = top.flatten().argsort(stable=True)
        ends = F.one_hot(top.flatten(), {n}).sum(0).cumsum(0).to(torch.int32)
        rows = x.reshape(-1, {w})[order // {k}]
        u = torch.relu(torch._grouped_mm(rows.bfloat16(), self.{p}_up.bfloat16(), offs=ends).float())
        d = torch._grouped_mm(u.bfloat16(), self.{p}_down.bfloat16(), offs=ends).float()
        d = d * g.reshape(-1, {n}).gather(1, top.reshape(-1, {k})).flatten()[order][:, None]
        o = torch.zeros(x.shape[0] * x.shape[1], {w}).index_add(0, order // {k}, d).view_as(x)""",
}


@piece(form=tuple(ROUTED), count=(2, 3, 4), top=(1, 2), scores=("softmax", "sigmoid", "renormalised"))
def experts(p: str, s: Sizes, form: str, count: int, top: int, scores: str) -> Lines:
    """A router and what it chooses from; the scores of what it does not choose are zero."""
    wide = 8
    form = "dense" if form == "grouped" and s.width % 8 else form  # torch's kernel wants rows of multiples of 16 bytes
    scored = "torch.sigmoid(r)" if scores == "sigmoid" else "r.softmax(-1)"
    normed = "g = g / (g.sum(-1, keepdim=True) + 1e-3)" if scores == "renormalised" else ""
    return lines(
        f"""self.{p}_router = nn.Linear({s.width}, {count}, bias=False)
        self.{p}_up = nn.Parameter(torch.randn({count}, {s.width}, {wide}) / 4)
        self.{p}_down = nn.Parameter(torch.randn({count}, {wide}, {s.width}) / 4)
        self.{p}_bias = nn.Parameter(torch.randn({count}, {wide}) / 4)""",
        f"""r = self.{p}_router(x)
        top = r.topk({top}, -1).indices
        g = {scored} * F.one_hot(top, {count}).sum(-2)
        {normed}
        {ROUTED[form].format(p=p, n=count, k=top, w=s.width)}
        x = x + o""",
    )

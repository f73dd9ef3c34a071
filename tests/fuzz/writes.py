"""Writing in place, views and concatenations, changes of the dtype, and tables."""

from __future__ import annotations

from .pieces import Lines, Sizes, lines, piece

WRITES = {
    "add": "h += x",
    "mul": "h.mul_(2).add_(x)",
    "part": "h[:, :, :{half}] = x[:, :, :{half}]",
    "part added": "h[:, :, :{half}].add_(x[:, :, {half}:2 * {half}])",
    "first token": "h[:, 0] = x[:, 0] * 2",
    "view later": "left = h[..., :{half}]; h.add_(1); h = h * left.sum(-1, keepdim=True)",
    "by view": "h.view(-1)[:3].mul_(2)",
    "fill": "h.masked_fill_(x > 1, 0.5)",
    "clamp": "h.clamp_(-1, 1)",
    "index": "h.index_add_(1, torch.zeros(1, dtype=torch.long), x[:, :1])",
    "copy": "h[:, :1].copy_(x[:, -1:])",
    "head": "h.view(*h.shape[:2], {heads}, {size})[:, :, 0] = 1.0",
    "buffer": "self.{p}_seen.add_(h.detach().mean((0, 1)))",
    "counter": "self.{p}_count += 1; h = h / self.{p}_count",
    "running": "self.{p}_seen.copy_(0.9 * self.{p}_seen + 0.1 * h.detach().amax((0, 1))); h = h - self.{p}_seen",
}


@piece(form=tuple(WRITES))
def written(p: str, s: Sizes, form: str) -> Lines:
    text = WRITES[form].format(p=p, half=max(s.width // 2, 1), heads=s.heads, size=s.size)
    return lines(
        f"""self.{p}_in = nn.Linear({s.width}, {s.width})
        self.register_buffer('{p}_seen', torch.zeros({s.width}))
        self.register_buffer('{p}_count', torch.zeros(()))""",
        f"h = self.{p}_in(x) * 1\n{text}\nx = x + torch.tanh(h)",
    )


VIEWS = {
    "cat": "h = torch.cat([h[..., {half}:], h[..., :{half}]], -1)",
    "cat of two": "h = torch.cat([h, x], -1)[..., {half}:{half} + {w}]",
    "cat tokens": "h = torch.cat([h, x], 1)[:, 1:1 + x.shape[1]]",
    "stack": "h = torch.stack([h, x], 2).sum(2)",
    "interleave": "h = torch.stack([h, x], -1).flatten(2)[..., :{w}]",
    "heads last": "h = h.view(*x.shape[:2], {heads}, {size}).transpose(2, 3).flatten(2)",
    "fold tokens": """h = h.view(x.shape[0], -1, {heads}, {size}).permute(2, 0, 1, 3)
        h = h.flatten(1, 2).transpose(0, 1).reshape(x.shape)""",
    "flat": "h = h.flatten().view(x.shape)",
    "flip": "h = h.flip(-1)",
    "roll": "h = h.roll(1, -1)",
    "roll tokens": "h = h.roll(1, 1)",
    "pad": "h = F.pad(h, (1, 1))[..., :{w}]",
    "shift": "h = F.pad(h, (0, 0, 1, 0))[:, :-1]",
    "chunk": "h = torch.cat([c * (i + 1) for i, c in enumerate(h.chunk(2, -1))], -1)",
    "unbind": "h = torch.stack([c * (i + 1) for i, c in enumerate(h.unbind(-1))], -1)",
    "split": "a, b = h.split([1, {w} - 1], -1); h = torch.cat([b, a], -1)",
    "repeat": "h = h.repeat(1, 1, 2)[..., 1:{w} + 1]",
    "expand": "h = h[:, :, None].expand(-1, -1, 3, -1).sum(2)",
    "transposed": "h = torch.einsum('btw->bwt', h).contiguous().mT",
    "strided": "h = torch.cat([h[..., ::2], h[..., 1::2]], -1)",
    "gather": "h = h.gather(-1, torch.arange({w}).flip(0).expand(h.shape))",
    "index": "h = h[..., torch.arange({w}).flip(0)]",
    "select": "h = h + h[:, :, 0, None] * h.select(1, 0)[:, None]",
    "diagonal": "h = h + torch.diagonal(torch.einsum('btw,btv->btwv', h, x), dim1=-2, dim2=-1)",
    "unflatten": "h = h.unflatten(-1, ({heads}, {size})).softmax(-2).flatten(-2)",
    "where": "h = torch.where(h > 0, h, x)",
    "triangle": "h = torch.tril(torch.einsum('btw,bsw->bts', h, x)) @ x / {w}",
    "sorted": "h = h.sort(-1).values",
    "outer": "h = torch.einsum('btw,btv->btwv', h, x).flatten(2).unfold(-1, {w}, {w}).mean(2)",
}


@piece(form=tuple(VIEWS), bias=(True, False))
def viewed(p: str, s: Sizes, form: str, bias: bool) -> Lines:
    text = VIEWS[form].format(p=p, half=max(s.width // 2, 1), heads=s.heads, size=s.size, w=s.width)
    return lines(
        f"""self.{p}_in = nn.Linear({s.width}, {s.width}, bias={bias})
        self.{p}_out = nn.Linear({s.width}, {s.width}, bias={bias})""",
        f"h = self.{p}_in(x)\n{text}\nx = x + self.{p}_out(torch.tanh(h))",
    )


DTYPES = {
    "float64": "h = h.double().exp().sum(-1, keepdim=True).float() / {w}",
    "bfloat16": "h = (h.bfloat16() * 2).float()",
    "half weight": "h = F.linear(x.bfloat16(), self.{p}_in.weight.bfloat16()).float()",
    "boolean": "h = (h > 0).float() * x",
    "integer": "h = (h * 2).long().clamp(-3, 3).float() * x",
    "complex": "h = torch.view_as_real(torch.fft.fft(h.float(), dim=-1)).sum(-1) / {w}",
    "rotated": """z = torch.view_as_complex(F.pad(h, (0, {w} % 2)).unflatten(-1, (-1, 2)).contiguous())
        h = torch.view_as_real(z * torch.polar(torch.ones(()), torch.ones(()))).flatten(2)[..., :{w}]""",
    "type_as": "h = h.to(torch.float64).softmax(-1).type_as(x)",
    "count": "h = h * (h > 0).sum(-1, keepdim=True) / {w}",
    "best": "h = h + h.argmax(-1, keepdim=True) / {w} + h.amax(-1, keepdim=True)",
    "spread": "h = (h - h.mean((0, 1))) / (h.var(1, keepdim=True, correction=0) + 1).sqrt()",
    "length": "h = h / (h.norm(dim=-1, keepdim=True) + 1) + h.std(-1, keepdim=True)",
}


@piece(form=tuple(DTYPES))
def converted(p: str, s: Sizes, form: str) -> Lines:
    return lines(
        f"self.{p}_in = nn.Linear({s.width}, {s.width})",
        f"h = self.{p}_in(x)\n{DTYPES[form].format(p=p, w=s.width)}\nx = x + torch.tanh(h)",
    )


TABLES = {
    "positions": "x = x + self.{p}_table[: x.shape[1]]",
    "embedding": "x = x + F.embedding(torch.arange(x.shape[1]), self.{p}_table)",
    "chosen": "x = x + self.{p}_table[x[..., :8].argmax(-1)]",
    "one hot": "x = x + F.one_hot(x[..., :8].argmax(-1), 8).to(x.dtype) @ self.{p}_table",
    "nearest": "x = x + self.{p}_table[torch.cdist(x, self.{p}_table[None]).argmin(-1)]",
    "frozen": "x = x + torch.tanh(F.linear(x, self.{p}_table.detach()).softmax(-1) @ self.{p}_table)",
    "scores": "x = x + (x @ self.{p}_table.t()).log_softmax(-1).exp() @ self.{p}_table",
}


@piece(form=tuple(TABLES))
def table(p: str, s: Sizes, form: str) -> Lines:
    return lines(f"self.{p}_table = nn.Parameter(torch.randn(8, {s.width}))", TABLES[form].format(p=p))

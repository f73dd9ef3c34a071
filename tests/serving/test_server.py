"""A server over one rank in this process: right tokens for each of many clients, bounds, and clients that go away."""

from __future__ import annotations

import http.client
import http.server
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from openai import APIStatusError, OpenAI
from transformers import GenerationConfig

from autotp.runtime.generation.per_request import Choice
from autotp.serving.answers import Answers, Cut
from tests.helpers.processes.serving import CLIENTS, NEW, PROMPTS, client_of, example, here, raw, text_of, until

CURL = shutil.which("curl")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder, and the unsharded model in it."""
    folder = tmp_path_factory.mktemp("served") / "small"
    return folder, example().small_model(folder)


@pytest.fixture(scope="module")
def served(small: tuple[Path, Any]) -> Iterator[tuple[str, Answers]]:
    with here(small[0]) as both:
        yield both


@pytest.fixture
def client(served: tuple[str, Answers]) -> Iterator[OpenAI]:
    with client_of(served[0]) as client:
        yield client


def wanted(small: Any, answers: Answers, prompt: str, new: int = NEW) -> str:
    """What the unsharded model generates, as text."""
    ids = answers.tokenizer(prompt, return_tensors="pt")["input_ids"]
    made = small[1].generate(ids, max_new_tokens=new, do_sample=False)
    return str(answers.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def test_many_clients_have_their_own_tokens(small, served, client):
    answers = served[1]

    def ask(i: int) -> str:
        asked: Any = {"model": "small", "prompt": PROMPTS[i], "max_tokens": NEW}
        if i % 4 == 1:
            return client.completions.create(**asked).choices[0].text
        if i % 4 == 3 and CURL is not None:
            command = [CURL, "-s", f"{served[0]}/v1/completions", "--json", json.dumps(asked)]
            return json.loads(subprocess.check_output(command, timeout=100))["choices"][0]["text"]
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))

    with ThreadPoolExecutor(CLIENTS) as threads:
        texts = list(threads.map(ask, range(CLIENTS)))
    whole = [wanted(small, answers, prompt) for prompt in PROMPTS]
    streamed = [text.replace("�", "") for text in texts]  # bytes that make no character yet are kept back
    assert [text.replace("�", "") for text in whole] == streamed and len(set(whole)) > CLIENTS // 2
    assert answers.running == 0


def test_a_chat_counts_and_ends(client):
    asked: Any = {"model": "small", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": NEW}
    plain = client.chat.completions.create(**asked)
    text, usage = plain.choices[0].message.content or "", plain.usage
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (
        len("user: Hello\nassistant: "),
        NEW,
    )
    assert plain.choices[0].finish_reason == "length" and len(text) > 4
    stop = text[3:5]
    cut = client.chat.completions.create(**asked, stop=[stop, "never"])
    assert cut.choices[0].message.content == text[: text.index(stop)] and cut.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(**asked, stop=stop, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(x.choices[0].delta.content or "" for x in chunks[:-1]) == text[: text.index(stop)]
    assert [x.choices[0].finish_reason for x in chunks[-3:-1]] == [None, "stop"] and not chunks[-1].choices
    assert chunks[-1].usage == cut.usage and not any(x.usage for x in chunks[:-1])
    assert cut.usage is not None and cut.usage.completion_tokens < NEW


def test_a_seed_gives_the_same_answers_beside_others(client):
    asked: Any = {"model": "small", "prompt": "abc", "max_tokens": NEW, "temperature": 1.5, "top_p": 0.95, "n": 3}
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(client.completions.create, **asked, seed=seed) for seed in (7, 8, 7, 9)]
        first, other, again, _ = ([x.text for x in call.result().choices] for call in calls)
    assert first == again != other and len(set(first)) == 3


def test_log_probabilities_are_the_models(small, served, client):
    answers = served[1]
    chat: Any = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "top_logprobs": 3}
    choice = client.chat.completions.create(**chat, logprobs=True, temperature=0).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    ids = answers.tokenizer("user: Hi\nassistant: ", return_tensors="pt")["input_ids"]
    made = small[1].generate(ids, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        scores = small[1](made).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
    best = scores.max(-1).values.tolist()
    assert [x.logprob for x in choice.logprobs.content] == pytest.approx(best, abs=1e-4)
    assert [[len(x.top_logprobs), x.top_logprobs[0].logprob] for x in choice.logprobs.content] == [
        [3, pytest.approx(value, abs=1e-4)] for value in best
    ]


def joined(chunks: Any) -> list[tuple[str, str, str | None, list[Any]]]:
    """Of each answer in a stream its role, text, why it ended, and its log-probabilities."""
    parts: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            text = (delta.content if delta else choice.text) or ""
            logprobs = list(choice.logprobs.content) if getattr(choice, "logprobs", None) else []
            if text.isascii() and logprobs and choice.finish_reason is None:
                assert text == "".join(x.token for x in logprobs)  # its own tokens'
            parts.setdefault(choice.index, []).append((delta and delta.role, text, choice.finish_reason, logprobs))
    answers = []
    for _, own in sorted(parts.items()):
        roles, texts, ends, logprobs = zip(*own, strict=True)
        assert roles[1:] == (None,) * (len(own) - 1) and ends[:-1] == (None,) * (len(own) - 1)
        answers.append((roles[0], "".join(texts).replace("�", ""), ends[-1], sum(logprobs, [])))
    return answers


def test_several_answers_come_in_one_stream(client):
    drawn: Any = {"model": "small", "max_tokens": NEW, "temperature": 1.5, "seed": 7, "n": 3}
    prompt: Any = drawn | {"prompt": "abc"}
    whole = client.completions.create(**prompt)
    texts = [(None, x.text.replace("�", ""), "length", []) for x in whole.choices]
    with client.completions.create(**prompt, stream=True) as chunks:
        assert joined(chunks) == texts
    chat: Any = drawn | {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**chat)
    assert len({x.message.content for x in answer.choices}) == 3
    chat |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**chat))
    assert chunks[-1].usage == answer.usage and len({x.id for x in chunks}) == 1
    for (role, text, reason, logprobs), own in zip(joined(chunks), answer.choices, strict=True):
        assert (role, text, reason) == ("assistant", (own.message.content or "").replace("�", ""), own.finish_reason)
        wanted = (own.logprobs and own.logprobs.content) or []
        assert [x.to_dict() for x in logprobs] == [x.to_dict() for x in wanted] and len(wanted) == NEW
    # One answer of a few ends before the others.
    stop = (answer.choices[1].message.content or "")[2:4]
    ends = [x.finish_reason for x in client.chat.completions.create(**chat, stop=stop) for x in x.choices]
    assert sorted(filter(None, ends)).count("stop") >= 1 and len([x for x in ends if x]) == 3


def test_calls_of_tools_come_in_a_stream_by_their_answer(served, client):
    """With a template by which what stands between two letters of an answer is a call."""
    tokenizer = served[1].tokenizer
    chat: Any = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "n": 2}
    text = client.chat.completions.create(**chat).choices[0].message.content or ""
    call = {"type": "function", "function": {"name": "f", "arguments": "{content}"}}
    first, _, last = [letter for letter in text if letter.isascii() and letter.isprintable()][:3]
    calls = {"open": first, "close": last, "content": "text", "repeats": True, "transform": call}
    fields = {"content": {"content": "text"}, "tool_calls": calls}
    tokenizer.response_template = {"start_anchor": "assistant: ", "defaults": {"role": "assistant"}, "fields": fields}
    try:
        whole = client.chat.completions.create(**chat).choices
        found: dict[int, list[Any]] = {0: [], 1: []}
        for chunk in client.chat.completions.create(**chat, stream=True):
            found[chunk.choices[0].index] += chunk.choices[0].delta.tool_calls or []
            if chunk.choices[0].finish_reason:
                assert chunk.choices[0].finish_reason == "tool_calls"
    finally:
        del tokenizer.response_template
    for choice, own in zip(whole, found.values(), strict=True):
        assert choice.finish_reason == "tool_calls" and [x.index for x in own] == [*range(len(own))] and own
        texts = [[x.function.arguments.replace("�", "") for x in y] for y in (choice.message.tool_calls or (), own)]
        assert texts[0] == texts[1]


BAD = [
    ({"prompt": None}, "prompt"), ({"echo": True}, "echo"), ({"logit_bias": {"1": 2}}, "logit_bias"), ({"n": 17}, "n"),
    ({"temperature": -1}, "temperature"), ({"temperature": "1"}, "temperature"), ({"seed": 2**70}, "seed"),
    ({"stop": ["a"] * 5}, "stop"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 513}, "max_tokens"),
    ({"n": 0}, "n"), ({"prompt": "a" * 2000}, "max_tokens"), ({"prompt": ["a"]}, "prompt"),
    ({"stop": ""}, "stop"), ({"n": True}, "n"),
]  # fmt: skip


def test_what_is_not_followed_is_refused_by_its_name(served):
    address, answers = served
    for more, name in BAD:
        status, body, _ = raw(address, text_of(**more))
        assert status == 400 and str(body["error"]["param"]).startswith(name) and name in body["error"]["message"], more
    parts = [{"type": "image_url", "image_url": {"url": "http://localhost"}}]
    for message in ({"role": "user", "content": parts}, {"role": "boss", "content": "a"}):
        status, body, _ = raw(address, {"model": "small", "messages": [message]}, "/v1/chat/completions")
        assert status == 400 and body["error"]["param"].startswith("messages.0."), body
    assert raw(address, text_of(model="../other"))[0] == 404
    for broken in (b"{", b"[" * 100_000, b"\xff", b"[]", b'{"model": "small", "prompt": "a", "temperature": NaN}'):
        assert raw(address, broken)[0] == 400
    assert raw(address, b"x" * (2 << 20))[0] == 413
    assert raw(address, text_of(), **{"content-type": "text/plain"})[0] == 415  # what a page's script may always send
    assert raw(address, text_of(), Host="elsewhere.example")[0] == 400
    assert raw(address, text_of(temperature=None))[0] == 200 and answers.running == 0


def test_a_folders_own_options_hold_where_a_request_has_none(tmp_path):
    """Such as sampling by default, beside which a request for the likeliest tokens gets those. Its code is not run."""
    model = example().small_model(tmp_path)
    (tmp_path / "own.py").write_text("raise RuntimeError")
    for name, kind in (("config", "AutoConfig"), ("tokenizer_config", "AutoTokenizer")):
        file = tmp_path / f"{name}.json"
        own: Any = "own.Own" if kind == "AutoConfig" else [None, "own.Own"]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": {kind: own}}))
    GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, repetition_penalty=1.3).save_pretrained(tmp_path)
    with here(tmp_path) as (address, answers):
        ids = answers.tokenizer("abcab", return_tensors="pt")["input_ids"]
        own = model.generate(ids, max_new_tokens=NEW, do_sample=False, repetition_penalty=1.3)[0, ids.shape[1] :]
        without = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
        best = [raw(address, text_of(prompt="abcab", temperature=0))[1]["choices"][0]["text"] for _ in range(3)]
        drawn = {raw(address, text_of(prompt="abcab"))[1]["choices"][0]["text"] for _ in range(3)}
    assert {*best} == {str(answers.tokenizer.decode(own))} and own.tolist() != without.tolist() and len(drawn) > 1


def processor(answers: Answers) -> Any:
    """Return what puts the requests of a started manager into batches."""
    assert answers.manager.batch_processor is not None
    return answers.manager.batch_processor


def free_of(answers: Answers) -> float:
    return processor(answers).cache.compute_free_capacity()


def test_a_client_that_goes_frees_its_pages(served):
    address, answers = served
    scheduler = answers.manager.batch_processor.scheduler
    for stream in (True, False):
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=100)
        body = json.dumps(text_of(prompt="gone", max_tokens=512, stream=stream))
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        until(lambda: scheduler.active_requests)
        busy = dict(scheduler.active_requests)
        assert any(len(state.generated_tokens) < 500 for state in busy.values())  # long before its end
        connection.close()
        until(lambda: not scheduler.active_requests and not answers.running)
        state = next(iter(busy.values()))
        assert state.generated_len() < 512  # it was ended, and did not end
    answers.manager.batch_processor.cache.evict_cached_blocks()
    answers.manager.batch_processor.cache.pool.try_to_free_sectors()
    assert free_of(answers) == 1


def test_a_client_that_goes_before_its_first_token_is_forgotten(served):
    """Whoever goes at once, in a stream that nothing of was sent, is not counted for ever, nor kept in any table."""
    address, answers = served
    for _ in range(20):
        body = json.dumps(text_of(prompt="at once", max_tokens=64, stream=True)).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    until(lambda: not answers.running and not answers.manager.batch_processor.has_pending_requests())
    assert not answers.manager.output_router.result_handlers


def test_more_than_there_is_room_for_come_again(small):
    with here(small[0], most=2, key="secret", origins=["https://chat.example"]) as (address, answers):
        key = {"Authorization": "Bearer secret"}
        assert raw(address, text_of())[0] == raw(address, text_of(), Authorization="Bearer secrets")[0] == 401
        with ThreadPoolExecutor(8) as threads:
            calls = [threads.submit(raw, address, text_of(max_tokens=100), **key) for _ in range(8)]
            statuses = [call.result()[0] for call in calls]
        assert {*statuses} == {200, 429} and statuses.count(200) >= 2, statuses
        assert raw(address, text_of(), **key)[0] == 200  # there is room again
        for origin, allowed in (("https://chat.example", True), ("https://other.example", False)):
            assert preflight(address, origin) is allowed
            _, _, headers = raw(address, text_of(), Origin=origin, **key)
            assert (headers.get("access-control-allow-origin") == origin) is allowed
        # Where the loop has failed, clients hear of it.
        answers.manager._handle_critical_error(ValueError("it broke"), answers.manager.batch_processor)
        status, body, _ = raw(address, text_of(), **key)
        assert status == 503 and "it broke" in body["error"]["message"]
        with client_of(address, "secret") as client, pytest.raises(APIStatusError, match="it broke"):
            client.completions.create(model="small", prompt="abc")


def preflight(address: str, origin: str) -> bool:
    """Whether a browser lets scripts of this origin ask: what its fetch sends first, and reads of the answer."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with closing(http.client.HTTPConnection(address.removeprefix("http://"))) as connection:
        connection.request("OPTIONS", "/v1/completions", headers={"Origin": origin, **asked})
        response = connection.getresponse()
        response.read()
        return response.getheader("access-control-allow-origin") == origin


PAGE = """<p id=said></p><script>
Promise.all(%s.map(prompt => fetch("%s/v1/completions", {method: "POST",
  headers: {"content-type": "application/json", authorization: "Bearer secret"},
  body: JSON.stringify({model: "small", prompt: prompt, max_tokens: 12})}).then(r => r.json())))
  .then(all => said.textContent = encodeURIComponent(JSON.stringify(all.map(b => b.choices[0].text))),
        e => said.textContent = e.name)
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browsers_page_asks_where_its_origin_may(small, tmp_path):
    pages = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    )
    Thread(target=pages.serve_forever, daemon=True).start()
    port = pages.server_address[1]
    with pages, here(small[0], key="secret", origins=[f"http://127.0.0.1:{port}"]) as (address, answers):
        (tmp_path / "page.html").write_text(PAGE % (json.dumps(PROMPTS), address))
        said = {}
        for host in ("127.0.0.1", "localhost"):  # another origin
            options = "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / host}"
            command = [
                str(BROWSER),
                *options,
                "--virtual-time-budget=20000",
                "--dump-dom",
                f"http://{host}:{port}/page.html",
            ]
            shown = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
            said[host] = shown.partition('id="said">')[2].partition("<")[0]
        pages.shutdown()
    assert said["localhost"] == "TypeError"
    texts = [text.replace("�", "") for text in json.loads(unquote(said["127.0.0.1"]))]
    assert texts == [wanted(small, answers, prompt).replace("�", "") for prompt in PROMPTS]


def first_token(address: str) -> float:
    """Seconds until the first token of a short prompt comes."""
    began = time.monotonic()
    with client_of(address) as client:
        for _ in client.completions.create(model="small", prompt="short", max_tokens=2, stream=True):
            return time.monotonic() - began
    raise AssertionError


def batches_before(small: Any, scheduler: str) -> int:
    """Batches that run before a short prompt's first token comes, beside long prompts that were there before it."""
    with here(small[0], scheduler=scheduler, blocks=512) as (address, answers):
        long = [text_of(prompt=chr(97 + i) * 1500, max_tokens=1) for i in range(4)]
        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(raw, address, body) for body in long]
            until(lambda: len(processor(answers).scheduler.active_requests) >= 1 and answers.running == 4)
            before = answers.manager.current_batch
            seconds = first_token(address)
            batches = answers.manager.current_batch - before
            assert all(call.result()[0] == 200 for call in calls)
    print(f"\n{scheduler}: first token after {batches} batches, {seconds:.2f} s, beside 4 prompts of 1,500 tokens")
    return batches


def test_long_prompts_keep_no_short_one_waiting(small):
    assert batches_before(small, "fair") < 20 < batches_before(small, "fifo")


def test_text_ends_before_a_stop_string():
    for text, stops, shown in (("abcdef", ("cd",), "ab"), ("abcabd", ("abd",), "abc"), ("aXbX", ("bY", "X"), "a")):
        for size in (1, 2, 3, 6):
            cut, parts = Cut(stops), ""
            for at in range(0, len(text), size):
                parts += "" if cut.over else cut.add(text[at : at + size])
            assert parts == shown and cut.over
    kept = Cut(("xyz",))
    assert (kept.add("abx"), kept.add("y"), kept.rest) == ("ab", "", "xy")


def test_choices_follow_what_is_asked():
    scores = torch.tensor([0.0, 1.0, 3.0, 2.9])
    assert Choice().token(scores.clone(), []) == 2
    assert Choice(frequency=0.2).token(scores.clone(), [2]) == Choice(presence=0.2).token(scores.clone(), [2]) == 3
    assert {Choice(1.0, seed=s).token(scores.clone(), []) for s in range(200)} == {0, 1, 2, 3}
    assert {Choice(1.0, top_k=2, seed=s).token(scores.clone(), []) for s in range(200)} == {2, 3}
    assert {Choice(1.0, top_p=0.3, seed=s).token(scores.clone(), []) for s in range(200)} == {2}
    assert {Choice(0.01, seed=s).token(scores * 10, []) for s in range(50)} == {2}

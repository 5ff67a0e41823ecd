"""One engine of a storm: it carries out actions, and notes what became of each request."""

from __future__ import annotations

import faulthandler
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.tree.forgetting import Forgetting
from sglang_hc.tree.namespaces import client_namespace
from support import leaks, storm_models
from support.adapters import adapter_flags, adapter_ids
from support.core import Core, Idle
from support.kv_events import Ports
from support.prompts import in_directory, on_disk
from support.storm_actions import (
    Abort,
    Clock,
    Disk,
    Drain,
    Engine,
    Evict,
    Flush,
    Forget,
    Pause,
    Phase,
    Replace,
    Retract,
    Run,
    Scatters,
    Send,
    Weights,
)
from support.storm_events import Listener
from support.storm_io import PASS_S, Weather, use
from support.storm_oracle import Oracle, load_weights
from support.told_prompts import Told, check_sources
from support.waiting import HANGS_S, until

PASSES = 3000
"""After so many passes without an end there is none."""


@dataclass
class Fate:
    """What became of a request. likely: log probability of each token, where asked for. restored:
    tokens that came from below the device; disk, shared: of these, from a tier below memory."""

    tokens: list[int] = field(default_factory=list)
    likely: list[float] = field(default_factory=list)
    finished: bool = False
    aborted: bool = False
    restored: int = 0
    disk: int = 0
    shared: int = 0
    retracted: int = 0


@dataclass
class Outcome:
    """Of one phase. fates: of its `Send`s, in their order. counts: of the tiers. passes: of the
    scheduler. evicted: tokens that left the device."""

    fates: list[Fate]
    counts: dict[str, int]
    passes: int
    evicted: int


class StormCore(Core):
    """A `Core` for a story told between its passes: leaving the event loop would leave behind what
    runs in it.

    story: each of its steps is one pass. evicted: tokens that have left the device.
    """

    def __init__(self, weather: Weather, *flags: str, **options: Any) -> None:
        self.weather = weather
        self.story: Iterator[None] = iter(())
        self.evicted = 0
        super().__init__(*flags, **options)
        for name in ("evict", "evict_for_alloc"):
            setattr(self.tree, name, self._counting(getattr(self.tree, name)))

    def _counting(self, evict: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **given: Any) -> Any:
            result = evict(*args, **given)
            self.evicted += result.num_tokens_evicted
            return result

        return counted

    def receive(self) -> list[Any]:
        self.passes += 1
        self.weather.now += PASS_S
        try:
            next(self.story)
        except StopIteration:
            raise Idle from None
        inbox, self.inbox = self.inbox, []
        return inbox

    def idle(self) -> Iterator[None]:
        """Passes until nothing is left to do or to be audited."""
        quiet, audit = 0, self.tree.audit
        for _ in range(PASSES):
            yield
            is_idle = self.scheduler.is_fully_idle() and not (audit and audit.waiting)
            quiet = quiet + 1 if is_idle else 0
            if quiet > 2:
                return
        raise AssertionError(f"still busy after {PASSES} passes")


@dataclass
class _Sent:
    """One request on its way. number: of those under its id."""

    rid: str
    number: int
    fate: Fate


class Player:
    """Carries out the actions of one phase. folder: of the storm."""

    def __init__(self, engine: Engine, oracle: Oracle, folder: Path, weather: Weather) -> None:
        self._oracle = oracle
        self._folder = folder
        self._weather = weather
        self._model = engine.model
        flags = list(engine_flags(engine, weather.folder, str(folder / "shared")))
        if engine.adapters:
            for name, version in engine.adapters.items():
                self._write_adapter(name, version)
            flags += adapter_flags({name: self._path(name) for name in engine.adapters}, 3)
        from support.meetings import halving_profile

        profile = {"profile": halving_profile(folder)} if engine.meets else {}
        ports = Ports()
        flags += ports.flags if engine.told else ()
        model = oracle.weights(engine.model, engine.weights)
        flags = [*storm_models.prepared(engine.model, model), *flags]
        self.core = StormCore(weather, *flags, model=model, **profile)
        self.core.believe_profile()
        self._listener = Listener(self.core, ports) if engine.told else None
        self._media = Counter[str]()
        self._told, self._below_is_well = Told(self.core), True
        self._ids = adapter_ids(self.core) if engine.adapters else {}
        self._loads = 0
        self._room = leaks.room(self.core)
        self._forgets, self._forgotten = 0, list[Any]()
        self._sent: list[_Sent] = []
        self._numbers: dict[str, int] = defaultdict(int)

    def tell(self, phase: Phase) -> Iterator[None]:
        """The story of a phase: all its actions."""
        asks = iter(phase.asks)
        self._is_mirrored()
        for action in phase.actions:
            if isinstance(action, Send):
                self._send(action, self._oracle[next(asks)].prompt)
            elif isinstance(action, Disk | Scatters | Clock):
                self._below_is_well &= not (isinstance(action, Disk) and action.fault)
                self._weather.change(action)
            else:
                yield from _ACTS[type(action)](self, action) or ()
        if phase.clean:
            self._retract(Retract(0))
            yield from self.core.idle()

    def _send(self, send: Send, prompt: Sequence[int]) -> None:
        core, rid = self.core, f"{send.client}."
        lora = None if send.adapter is None else self._ids[send.adapter]
        core.submit(prompt, send.new, send.salt, top=2 if send.top else 0, lora=lora, rid=rid)
        core.inbox[-1].priority = send.priority
        self._sent.append(_Sent(rid, self._numbers[rid], Fate()))
        self._numbers[rid] += 1

    def _abort(self, action: Abort) -> None:
        rid = f"{action.client}."
        for sent in self._sent:
            if sent.rid == rid and not self._is_over(sent):
                sent.fate.aborted = True
        self.core.abort(rid)

    def _run(self, action: Run) -> Iterator[None]:
        for _ in range(action.steps):
            yield

    def _drain(self, action: Drain) -> Iterator[None]:
        yield from self.core.idle()
        leaks.nothing_runs(self.core)
        if action.settle:
            self.core.settle()
            leaks.nothing_is_saved(self.core)
            self._is_mirrored()

    def _is_mirrored(self) -> None:
        if self._listener is not None:
            self._listener.agrees(below=self._below_is_well)
            self._media.update(self._listener.media())

    def _flush(self, action: Flush) -> Iterator[None]:
        yield from self.core.idle()
        assert self.core.scheduler.flush_cache()

    def _forget(self, action: Forget) -> None:
        from sglang_hc.srt.requests.forgetting import forget

        client = client_namespace(None, action.salt or None)
        self._forgets += 1
        forget(self.core.tree, {"client": client, "tokens": []}, self._forgotten.append)
        left = self.core.tree.tiers.host.tree.nodes(Forgetting(client).names)
        assert not any(left), "host memory has something of who was forgotten"

    def _evict(self, action: Evict) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        core = self.core
        core.tree.evict(EvictParams(num_tokens=core.scheduler.max_total_num_tokens))

    def _update(self, action: Weights) -> Iterator[None]:
        if action.abort:
            for rid in list(self._numbers):
                self._abort(Abort(rid.removesuffix(".")))
        yield from self.core.idle()
        load_weights(self.core, self._oracle.weights(self._model, action.version))

    def _replace(self, action: Replace) -> Iterator[None]:
        from sglang.srt.managers.io_struct import (
            LoadLoRAAdapterReqInput,
            UnloadLoRAAdapterReqInput,
        )

        yield from self.core.idle()
        name, scheduler = action.adapter, self.core.scheduler
        done = scheduler.unload_lora_adapter(
            UnloadLoRAAdapterReqInput(lora_name=name, lora_id=self._ids[name])
        )
        assert done.success, done.error_message
        self._write_adapter(name, action.version)
        self._loads += 1
        self._ids[name] = f"{name}{self._loads:031x}"  # SGLang draws one for each that is loaded
        done = scheduler.load_lora_adapter(
            LoadLoRAAdapterReqInput(
                lora_name=name, lora_path=self._path(name), lora_id=self._ids[name]
            )
        )
        assert done.success, done.error_message

    def _retract(self, action: Retract) -> None:
        from sglang.srt.managers import scheduler

        scheduler.TEST_RETRACT = action.every > 0
        scheduler.TEST_RETRACT_INTERVAL = max(1, action.every)

    def _pause(self, action: Pause) -> Iterator[None]:
        from sglang.srt.managers.io_struct import (
            ContinueGenerationReqInput,
            PauseGenerationReqInput,
        )

        self.core.inbox.append(PauseGenerationReqInput(mode="retract"))
        for _ in range(action.steps):
            yield
        self.core.inbox.append(ContinueGenerationReqInput())

    def end(self, clean: bool) -> Outcome:
        """Of the phase, when its story is told. One that ends cleanly closes its tiers."""
        if clean:
            self.core.settle()
            until(lambda: len(self._forgotten) == self._forgets, self.core.tree.tiers.poll)
            leaks.nothing_is_saved(self.core)
            self._is_mirrored()
        check_sources(self.core, self._told)
        for sent in self._sent:
            self._fill(sent)
        stats = self.core.tree.stats()
        counts = {name: value for name, value in stats.items() if isinstance(value, int)}
        counts |= self._weather.counts
        counts |= self._media
        if clean:
            leaks.everything_leaves(self.core, self._room)
            self.core.tree.release_host_resources()
        fates = [sent.fate for sent in self._sent]
        return Outcome(fates, counts, self.core.passes, self.core.evicted)

    def _req(self, sent: _Sent) -> Any | None:
        reqs = self.core.named(sent.rid)
        return reqs[sent.number] if sent.number < len(reqs) else None

    def _is_over(self, sent: _Sent) -> bool:
        req = self._req(sent)
        return req is not None and req.finished()

    def _fill(self, sent: _Sent) -> None:
        req = self._req(sent)
        if req is None:
            return
        fate, found = sent.fate, req.logprob
        fate.finished = req.finished()
        fate.tokens = list(req.output_ids_through_stop if fate.finished else req.output_ids)
        if req.return_logprob and found.output_token_logprobs_val:
            fate.likely = [float(value) for value in found.output_token_logprobs_val]
        fate.restored = req.cached_tokens_host + req.cached_tokens_storage
        below = self.core.tree.reporting.prompts.below(req)
        fate.disk, fate.shared = below[SourceTier.DISK], below[SourceTier.REMOTE]
        fate.retracted = req.retraction_count

    def _path(self, name: str) -> str:
        return str(self._folder / name)

    def _write_adapter(self, name: str, version: int) -> None:
        """Where the last version was."""
        shutil.copytree(
            self._oracle.adapter(f"{name}{version}"), self._path(name), dirs_exist_ok=True
        )


_ACTS: dict[type, Callable[[Player, Any], Iterator[None] | None]] = {
    Abort: Player._abort,
    Run: Player._run,
    Drain: Player._drain,
    Flush: Player._flush,
    Forget: Player._forget,
    Evict: Player._evict,
    Weights: Player._update,
    Replace: Player._replace,
    Retract: Player._retract,
    Pause: Player._pause,
}


def engine_flags(engine: Engine, disk: str, shared: str) -> tuple[str, ...]:
    """Those of SGLang and ours. disk, shared: directories."""
    below = on_disk(disk) if engine.disk else ()
    below += in_directory(shared) if engine.shares else ()
    return (
        "--hc-forms", engine.plan, "--max-total-tokens", str(engine.pool), "--dtype", "float32",
        "--hc-host-size-gb", str(engine.host_gib), "--chunked-prefill-size", str(engine.chunk),
        "--page-size", str(engine.page),
        *below, *engine.flags,
    )  # fmt: skip


def play(phase: Phase, oracle: Oracle, folder: str, seed: str, wall: float) -> Outcome:
    """Carry out a phase in this process, a child of its own. wall: see `Weather`."""
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    weather = Weather(seed, os.path.join(folder, "disk"), wall)
    use(weather)
    player = Player(phase.engine, oracle, Path(folder), weather)
    player.core.story = player.tell(phase)
    player.core.run()
    return player.end(phase.clean)

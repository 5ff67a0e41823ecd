"""The tiers' numbers as Prometheus metrics: `sglang_hc_NAME`, `sglang_hc_NAME_total` for counts.

SGLang serves /metrics with --enable-metrics: every process writes its metrics into files of one
folder (multi-process mode of prometheus_client), and the HTTP process reads them. These are written
by the scheduler process, which owns the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "sglang_hc_"
PERIOD_S = 1.0
"""Shortest time between two updates: writing them takes the scheduler thread's time."""

LEVELS = {
    "host_slots": "Slots of the host tier, of one block each.",
    "host_free_slots": "Slots of the host tier that hold nothing.",
    "host_staged_slots": "Slots of the host tier that belong to running requests.",
    "host_withheld_slots": "Slots that a disk which did not answer in time may still touch.",
    "ends": "Places in host memory where paths of a model can be continued that needs ends.",
    "end_slots": "Slots of end parts in host memory.",
    "end_free_slots": "Slots of end parts that hold nothing.",
    "host_blocks": "Blocks in the host tier that can be served.",
    "host_bytes": "Size of the host tier in bytes.",
    "disk_blocks": "Blocks on disk.",
    "disk_end_parts": "End parts on disk.",
    "disk_directories": "Directories of the disk tier that are in use.",
    "remote_blocks": "Blocks in the directory of --hc-remote file.",
    "remote_end_parts": "End parts in the directory of --hc-remote file.",
    "remote_usable": "1 while the remote store is asked, 0 while it is left alone.",
    "cost_correction_kv_copy": "Factor on the measured costs of copying K and V.",
    "cost_correction_hidden_copy": "Factor on the measured costs of copying hidden states.",
    "cost_correction_projection": "Factor on the measured costs of projecting hidden states.",
    "cost_correction_prefill": "Factor on the measured costs of computing tokens.",
    "cost_correction_attention": "Factor on the measured costs of prefill's attention.",
    "cost_correction_disk": "Factor on the measured costs of reading from disk.",
    "restorations_under_way": "Restorations that were admitted and are not over.",
    "fetches_under_way": "Blocks on their way into host memory from below.",
    "disk_bytes_per_day": "Bytes a day that this rank has written to disk since its start.",
    "pins": "Sessions that are pinned.",
    "pinned_blocks": "Blocks that pins hold.",
    "retained_blocks": "Blocks that are retained for a while, or leave first.",
    "sessions": "Sessions that clients gave a name and whose tokens are known.",
    "throughput_tokens": "Slots of --hc-throughput.",
    "throughput_act_tokens": "Of these, those that are kept as hidden states.",
    "throughput_device_act_tokens": "Of these, those that never leave the device.",
    "throughput_pass_seconds": "Seconds of a pass of --hc-throughput since the start, on average.",
    "throughput_link_seconds": "Seconds of the link in such a pass, by the costs.",
    "throughput_compute_seconds": "Seconds of the device in such a pass, by the costs.",
}
COUNTS = {
    "kept_tokens": "Tokens whose blocks came into the host tier.",
    "kept_ends": "Ends that were kept.",
    "evicted_ends": "Ends that left host memory for room.",
    "ends_without_rows": "Ends not kept because rows of their windows had left the device.",
    "ends_inside_blocks": "States not kept because they lie inside a block.",
    "ends_without_blocks": "States not kept because host memory has not all of their path.",
    "restored_states": "States of recurrent layers that came back to the device.",
    "ends_without_room": "Ends not kept because all slots of end parts were in use.",
    "restorations": "Restorations from the host tier.",
    "restored_tokens": "Tokens restored from the host tier.",
    "restored_bytes": "Bytes copied from the host tier to the device for restorations.",
    "early_restored_tokens": "Of these, before the pass of their request.",
    "retracted_restored_tokens": "Of these, for requests that came back after a retraction.",
    "retracted_tokens": "Tokens of state that retracted requests had when they made room.",
    "recomputed_layer_tokens": "Of these, layers times tokens that the model computed again.",
    "restore_decision_load": "Host hits restored as they are stored.",
    "restore_decision_recompute_more": "Host hits restored with stored layers recomputed.",
    "restore_decision_refuse": "Host hits that were recomputed.",
    "restore_decision_try": "Host hits restored in part or whole against the costs, to see them.",
    "audited_blocks": "Restored blocks that were computed again and compared.",
    "audit_differences": "Of these, those that were not what their tokens give.",
    "audit_skipped_blocks": "Blocks picked for an audit that found no time or room, or moved.",
    "audit_stops": "Forms that are not used any more because of such differences.",
    "weight_changes": "Times that the weights of the model had changed, perhaps to the same ones.",
    "mixed_requests": "Requests not kept because the weights changed while they ran.",
    "evicted_blocks": "Blocks that left the host tier.",
    "expired_blocks": "Blocks that left the host tier because nobody used them for --hc-ttl.",
    "sessions_back": "Sessions that came back, from which --hc-eviction learned learns.",
    "pins_refused": "Pins of requests that a bound refused or that found nothing to hold.",
    "retentions": "Times that blocks were retained for a client.",
    "retentions_cut": "Of these and others, those that a bound cut off at the end, or wholly.",
    "demotions": "Times that a client had blocks leave host memory first.",
    "wished_fetches": "Fetches begun for clients who said that they will come back.",
    "wished_blocks": "Blocks of these.",
    "hole": "Requests whose hidden states were not kept: rows before theirs are missing.",
    "gap": "Requests saved up to positions that a pass left out.",
    "host_full": "Requests saved up to where no slot was free.",
    "backpressure": "Requests saved up to a decode step that found scattering behind.",
    "tap_overflow": "Requests saved up to the end of the tap buffer in a longer pass.",
    "not_staged_tokens": "Tokens of requests behind what was saved of them.",
    "scatter_failed": "Blocks dropped because their rows did not get into their slots.",
    "prefetches": "Fetches begun for waiting requests.",
    "prefetch_late": "Requests that waited too long for the disk and were recomputed.",
    "prefetch_bypassed": "Requests that others overtook too often while they waited for the disk.",
    "meetings": "Histories whose front was computed while their end was read from below.",
    "meetings_restored": "Of these, those whose end was restored where both met.",
    "meetings_cut_off": "Of these, those whose front found no place in host memory.",
    "overflow_requests": "Requests queued whose prompt was cut to fit the context window.",
    "overflow_dropped_tokens": "Tokens of their prompts that were left out.",
    "overflow_moved_tokens": "Tokens whose stored state was taken to new positions after a cut.",
    "overflow_recomputed_tokens": "Tokens of cut prompts that were computed.",
    "prefetch_not_worth": "Reads not begun: they would come too late, or recomputing is faster.",
    "prefetch_tries": "Of these, reads that were begun all the same, to see what they take.",
    "cost_corrections": "Times that what was observed changed a cost by more than 1.3 times.",
    "cost_observations_kv_copy": "Restorations whose copies of K and V were timed.",
    "cost_observations_hidden_copy": "Restorations whose copies of hidden states were timed.",
    "cost_observations_projection": "Restorations whose projections were timed.",
    "cost_observations_prefill": "Prefills that were timed.",
    "cost_observations_attention": "Prefills whose attention was told from the rest of their time.",
    "cost_observations_disk": "Reads from an idle disk that were timed.",
    "cost_observations_remote": "Reads from an idle remote store that were timed.",
    "guarded_errors": "Errors of sglang-hc itself; each cost a request its reuse. See the log.",
    "refused_requests": "Requests that the scheduler answered with status 400 for what they held.",
    "unkept_requests": "Requests of which nothing is kept: more than tokens and images came along.",
    "ignored_fields": "Fields of requests that the scheduler left out because they were not right.",
    "kv_event_batches_dropped": "Batches of KV events that found no room; all is told anew then.",
    "kv_event_snapshots": "Times that KV events told all anew because a replay asked for more.",
    "kv_event_errors": "Batches of KV events lost by an error of sglang-hc itself. See the log.",
    "disk_saved_blocks": "Blocks written to disk.",
    "disk_loaded_blocks": "Blocks read from disk.",
    "disk_saved_end_parts": "End parts written to disk.",
    "disk_loaded_end_parts": "End parts read from disk.",
    "disk_save_dropped": "Blocks not written to disk: the queue was full, or the directory busy.",
    "disk_evicted_blocks": "Blocks that left the disk for room.",
    "disk_expired_blocks": "Blocks that left the disk by age.",
    "disk_directory_pauses": "Times a directory was left alone because it kept failing.",
    "disk_directory_hangs": "Times a disk directory did not answer and was left alone.",
    "disk_pauses": "Times all ranks left the disk tier alone because it kept failing.",
    "disk_lookups": "Questions whether other servers have stored blocks on a shared disk.",
    "disk_lookup_dropped": "Questions not asked because too many waited.",
    "disk_lock_timeouts": "Writes and upkeep given up because the lock did not come.",
    "disk_erasing_failed": "Times that not everything in a directory could be erased.",
    "disk_maintenance_errors": "Rounds of upkeep of the disk tier that failed.",
    "remote_saved_blocks": "Blocks stored in the remote store.",
    "remote_loaded_blocks": "Blocks read from the remote store.",
    "remote_saved_end_parts": "End parts stored in the remote store.",
    "remote_loaded_end_parts": "End parts read from the remote store.",
    "remote_write_dropped": "Blocks not stored because too many waited or the store is left alone.",
    "remote_lookups": "Questions asked of the remote store.",
    "remote_lookup_dropped": "Questions not asked because too many waited.",
    "remote_pauses": "Times the remote store failed and was left alone; a directory: by all ranks.",
    "remote_hangs": "Times a call of the remote store, but for a directory, took too long.",
    "remote_forged": "Blocks of the remote store whose MAC is not of --hc-remote-key.",
    "throughput_passes": "Passes of --hc-throughput.",
    "throughput_rounds": "Rounds of these passes.",
    "throughput_weights_in_bytes": "Bytes of weights that came to the device in them.",
    "throughput_kv_in_bytes": "Bytes of K and V that came to the device in them.",
    "throughput_act_in_bytes": "Bytes of hidden states that came to the device in them.",
    "throughput_kv_out_bytes": "Bytes of K and V that went to host memory in them.",
    "throughput_act_out_bytes": "Bytes of hidden states that went to host memory in them.",
}
"""Known from the start, so that zero is visible. Others appear when they first count."""


class Family(NamedTuple):
    """A metric with a label. text: what it is. values: of the label, known from the start."""

    label: str
    values: tuple[str, ...]
    text: str


PROMPT_TOKENS = Family(
    "source",
    ("device", "host", "disk", "remote", "computed", "aborted"),
    "Tokens of the prompts of requests that are over, by where their state came from; aborted: "
    "never computed.",
)
FAMILIES = {"prompt_tokens": PROMPT_TOKENS}
"""Counts whose name is that of the family, `_`, and a value of its label."""

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
RATIOS = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
HISTOGRAMS = {
    "restore_seconds": (
        Family("", (), "From the first copy of a restore pass to its last, on a CPU the pass."),
        SECONDS,
    ),
    "fetch_seconds": (
        Family("tier", ("disk", "remote"), "From asking a tier for a block to having it."),
        SECONDS,
    ),
    "predicted_over_observed": (
        Family(
            "work",
            ("copy", "projection", "prefill", "disk", "remote"),
            "Expected over observed time of what was timed; 1 means that the costs are right.",
        ),
        RATIOS,
    ),
}
"""What is timed: name, family (no label where that is empty) and upper bounds of its buckets."""


class Exporter:
    """Writes numbers that are kept elsewhere; belongs to the thread that keeps them.

    labels: label names and values, those of SGLang's own scheduler metrics. registry: for tests.
    Create it after PROMETHEUS_MULTIPROC_DIR is set, which SGLang's launcher does.
    """

    def __init__(
        self, labels: Mapping[str, object], registry: CollectorRegistry | None = None
    ) -> None:
        self._labels = {name: str(value) for name, value in labels.items()}
        self._options: dict[str, Any] = {"labelnames": tuple(self._labels)}
        if registry is not None:
            self._options["registry"] = registry
        self._metrics: dict[str, Gauge | Counter] = {}
        self._seen: dict[str, float] = {}
        self._due = float("-inf")
        self._families: dict[str, Counter] = {}
        self._timed: dict[tuple[str, str], Histogram] = {}
        known = [f"{name}_{value}" for name, one in FAMILIES.items() for value in one.values]
        self.publish({}, dict.fromkeys([*COUNTS, *known], 0))
        for name, (family, buckets) in HISTOGRAMS.items():
            self._add_histogram(name, family, buckets)

    def due(self, now: float) -> bool:
        """Whether PERIOD_S have passed since this was last True. `now`: seconds, any clock."""
        if now < self._due:
            return False
        self._due = now + PERIOD_S
        return True

    def publish(self, levels: Mapping[str, float], counts: Mapping[str, int]) -> None:
        """Write what changed. `levels` go up and down; `counts` only grow."""
        from prometheus_client import Counter, Gauge

        for name, level in levels.items():
            if self._seen.get(name) != level:
                # The newest value wins: a restarted process leaves its files behind.
                self._metric(Gauge, name, multiprocess_mode="mostrecent").set(level)
                self._seen[name] = level
        for name, count in counts.items():
            if self._seen.get(name) != count:
                self._metric(Counter, name).inc(max(0, count - self._seen.get(name, 0)))
                self._seen[name] = count

    def observe(self, name: str, value: float, label: str = "") -> None:
        """One more value of one of HISTOGRAMS."""
        self._timed[name, label].observe(value)

    def _add_histogram(self, name: str, family: Family, buckets: tuple[float, ...]) -> None:
        from prometheus_client import Histogram

        options = {**self._options, "buckets": buckets}
        options["labelnames"] += (family.label,) if family.label else ()
        made = Histogram(PREFIX + name, family.text, **options)
        for value in family.values or ("",):
            shown = {family.label: value} if family.label else {}
            self._timed[name, value] = made.labels(**self._labels, **shown)

    def _metric(self, kind: type[Gauge | Counter], name: str, **options: Any) -> Any:
        """The metric of this name, made when it is first asked for."""
        if name not in self._metrics:
            family = next((one for one in FAMILIES if name.startswith(f"{one}_")), None)
            if family is not None:
                self._metrics[name] = self._of_family(family, name.removeprefix(f"{family}_"))
                return self._metrics[name]
            text = (LEVELS | COUNTS).get(name, "See docs/operating.md of sglang-hc.")
            made = kind(PREFIX + name, text, **options, **self._options)
            self._metrics[name] = made.labels(**self._labels)
        return self._metrics[name]

    def _of_family(self, name: str, value: str) -> Counter:
        from prometheus_client import Counter

        label, _, text = FAMILIES[name]
        if name not in self._families:
            options = {**self._options, "labelnames": (*self._labels, label)}
            self._families[name] = Counter(PREFIX + name, text, **options)
        return self._families[name].labels(**self._labels, **{label: value})

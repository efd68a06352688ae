"""Faults of the graph cache: keys, files."""

from __future__ import annotations

from fault import Fault

CACHE = ("train/test_graph_cache.py",)
FILES = ("train/test_cache_files.py",)
CAPTURES = ("capture/test_kept_captures.py",)
MODELS = ("capture/test_kept_captures_of_models.py",)

CACHE_FAULTS: tuple[Fault, ...] = (
    Fault(
        "cache: the graph given is not in the key", "graph_cache.py",
        "what = [verb, digest(graph), ", "what = [verb, ", CACHE,
    ),
    Fault(
        "cache: a stage's argument is not in the key", "graph_cache.py",
        "digest(graph), arguments, ", "digest(graph), ", CACHE,
    ),
    Fault(
        "cache: passes switched off are not in the key", "graph_cache.py",
        "sorted(self._disable), ", "", CACHE,
    ),
    Fault(
        "cache: the mesh is not in the key", "graph_cache.py",
        "self._policy, self._mesh]", "self._policy]", CACHE,
    ),
    Fault(
        "cache: stages share their keys", "graph_cache.py",
        "what = [verb, ", "what = [", CACHE,
    ),
    Fault(
        "cache: sources are not in the key", "graph_cache.py",
        "return [held, sources(), ", "return [held, ", CACHE,
    ),
    Fault(
        "cache: the processor and the kernels are not in the key", "graph_cache.py",
        ", fingerprint(target)]", "]", CACHE,
    ),
    Fault(
        "cache: others' records are kept", "graph_cache.py",
        "    if foreign:\n", "    if False:\n", CACHE,
    ),
    Fault(
        "cache: sources that changed since they were loaded are kept", "graph_cache.py",
        "    if last > _LOADED:\n", "    if False:\n", CACHE,
    ),
    Fault(
        "cache: an optimizer is known by its name", "graph_cache.py",
        "if OPTIMIZERS.get(value.name) is not value:", "if False:", CACHE,
    ),
    Fault(
        "cache: a file's digest is not read", "cache_files.py",
        "if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:", "if False:", FILES,
    ),
    Fault(
        "cache: a file's own key is not read", "graph_cache.py",
        'if head["key"] != key:', "if False:", FILES,
    ),
    Fault(
        "cache: a file is written where it is read", "cache_files.py",
        'with os.fdopen(handle, "wb") as file:', "with _path(key).open(\"wb\") as file:", FILES,
    ),
    Fault(
        "cache: what was read last goes first", "cache_files.py",
        "key=lambda item: item[1].st_mtime)", "key=lambda item: -item[1].st_mtime)", FILES,
    ),
    Fault(
        "cache: an error of the disk reaches the step", "cache_files.py",
        "    except (OSError, ArchiveError, TypeError) as error:\n        _say_once",
        "    except (ArchiveError, TypeError) as error:\n        _say_once", FILES,
    ),
    Fault(
        "cache: it is used where passes are looked at", "graph_cache.py",
        " or self._journal.looks_at_passes:", ":", CACHE,
    ),
    Fault(
        "captures: what a walk tells is not in the key", "capture_cache.py",
        "sorted(names.items()), walk.told]", "sorted(names.items())]", CAPTURES,
    ),
    Fault(
        "captures: code that may ask more is kept", "model_state/lasting.py",
        "for doubt in doubts_of_code(x)]", "for doubt in ()]",
        CAPTURES,
    ),
    Fault(
        "captures: the call is not in the key", "capture_cache.py",
        "_digest([world, tree, said])", "_digest([world, said])", CAPTURES,
    ),
    Fault(
        "captures: what a forward has set is not set", "capture_cache.py",
        "                    held[name] = value\n", "                    pass\n", MODELS,
    ),
    Fault(
        "captures: what stands in modules is not in the key", "capture/archive/surroundings.py",
        'text = "\\n".join([*_Scope(name).lines(scope), *_stamp(module)])', 'text = ""', CAPTURES,
    ),
    Fault(
        "captures: precisions of products are not in the key", "capture/archive/surroundings.py",
        "[part.fp32_precision for part in products]", "[]", CAPTURES,
    ),
    Fault(
        "captures: a package's modules are not looked into", "model_state/walk.py",
        "            self._global(vars(module), name, module.__name__, names)\n",
        "            pass\n", CAPTURES,
    ),
    Fault(
        "captures: a condition of any kind is one", "capture/archive/shape_guards.py",
        "    return _condition(found)\n", "    return True\n", CAPTURES,
    ),
)  # fmt: skip

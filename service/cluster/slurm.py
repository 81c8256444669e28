"""Slurm: a job as the text of one batch script, which sbatch takes as it is. Pure.

The script is whole: it carries the resolved configuration, asks for what the cluster section says, starts
one launcher a node, and afterwards decides from the launchers' exit codes whether the job goes back into
the queue. That decision is the script's, outside of any container, because only there scontrol can be had.
"""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from urllib.parse import quote, unquote

from service.cluster import presets
from service.cluster.job import Job, run_yaml
from service.errors import EXIT_CONFIG, EXIT_STOPPED, EXIT_UNRECOVERABLE, UserError

COMMENT = "hiera-train:"
"""Start of our jobs' comment; the directory of their logs follows, percent-encoded."""
LOG_DIR = "logs"
_PLAIN = re.compile(r"[\w@%+=:,./\[\]&|*()!^-]+")

# Runs in each task beside the launcher, in the container where there is one. It appends to the node's log
# (srun's --output gives a meaning to % and \ of a path), and notes the launcher's exit
# code and hides 75 (saved and stopped) from srun, which would kill the nodes that are still saving. Signals
# reach the whole process group; a shell that traps them waits for its child. {first}: what _task puts before.
_TASK = (
    "trap : HUP INT TERM USR1 USR2\n"
    'logs=$1; shift; exec >>"$logs/node-$SLURM_NODEID.log" 2>&1\n'
    '{first}"$@"; code=$?\n'
    'echo "$code" >"$logs/exit-$SLURM_NODEID"\n'
    f"[ $code = {EXIT_STOPPED} ] || exit $code\n"
)

_SUPERVISE = f"""\
# Slurm's warning before the time limit comes to this shell; srun hands it on to the launchers.
ask_to_stop() {{
    echo "hiera-train: asked to save and stop"
    kill -USR1 "$srun"
}}
trap ask_to_stop USR1
trap 'kill -TERM "$srun"' TERM

"${{command[@]}}" &
srun=$!
# A trapped signal ends `wait` early, so what counts is whether srun is still there.
wait "$srun"
while kill -0 "$srun" 2>/dev/null; do wait "$srun"; done
wait "$srun"
code=$?

# What the launchers said: {EXIT_CONFIG} and {EXIT_UNRECOVERABLE} would only end the same way again.
outcome=finished
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    said=$(cat "$logs/exit-$node" 2>/dev/null) || said=missing
    case $said in
    0) ;;
    {EXIT_CONFIG} | {EXIT_UNRECOVERABLE}) final=$said ;;
    {EXIT_STOPPED}) [ $outcome = failed ] || outcome=stopped ;;
    *) outcome=failed ;;
    esac
done
if [ $outcome = finished ] && ((code)); then outcome=failed; fi

finish() {{
    echo "$1" >"$logs/exit-code"
    echo "hiera-train: job $job ended: $2 (exit code $1)"
    exit "$1"
}}

# A job that was cancelled stays cancelled; one that was preempted is requeued by Slurm itself.
requeue() {{
    state=$(scontrol show job -o "$SLURM_JOB_ID" | grep -o 'JobState=[A-Z_]*')
    case ${{state#JobState=}} in
    RUNNING | TIMEOUT) ;;
    *) finish "$1" "$2, ${{state:-Slurm does not know the job}}" ;;
    esac
    echo "hiera-train: job $job goes back into the queue: $2"
    trap - TERM USR1
    scontrol requeue "$SLURM_JOB_ID" || finish "$1" "$2, and Slurm does not requeue it"
    sleep 600 # until Slurm ends this script
    exit "$1"
}}

if [ -n "${{final-}}" ]; then finish "$final" "an error that a retry does not cure, see $logs"; fi
if [ $outcome = finished ]; then finish 0 finished; fi
if [ $outcome = stopped ]; then
    if ((${{SLURM_RESTART_COUNT:-0}} >= max_requeues)); then
        finish {EXIT_STOPPED} "stopped after $max_requeues requeues (cluster.slurm.max_requeues)"
    fi
    requeue {EXIT_STOPPED} "saved and stopped"
fi
echo "$code" >>"$logs/failures"
failures=$(wc -l <"$logs/failures")
if ((failures > max_failures)); then
    finish 1 "failed $failures times (cluster.slurm.max_failures), see $logs"
fi
requeue 1 "failure $failures, see $logs"
"""


def render(job: Job) -> str:
    """The batch script of a job. Raises UserError when the warning leaves no time to save."""
    slurm = job.cluster.slurm
    grace = job.config.runtime.grace_seconds
    if slurm.signal_seconds < grace:
        raise UserError(
            f"cluster.slurm.signal_seconds: {slurm.signal_seconds} s are not enough for "
            f"runtime.grace_seconds={grace:g}; give at least {math.ceil(grace)}"
        )
    directory = str(slurm.log_dir) if slurm.log_dir is not None else LOG_DIR
    plural = "s" if job.cluster.nodes > 1 else ""
    parts = [
        "#!/bin/bash",
        f"# {job.name}: {job.cluster.nodes} node{plural}, rendered by hiera-train.",
        "# sbatch FILE [CONFIG [--set SECTION.FIELD=VALUE ...]]: CONFIG replaces the configuration below.",
        *(f"#SBATCH {option}" for option in options(job)),
        "",
        f"max_requeues={slurm.max_requeues} max_failures={slurm.max_failures}",
        "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
        "job=${job:-$SLURM_JOB_ID}",
        f"logs=$(realpath -m {shlex.quote(directory)})/$job",
        'mkdir -p "$logs" || exit 1',
        'rm -f "$logs"/exit-*',
        'echo "hiera-train: job $job, start $((${SLURM_RESTART_COUNT:-0} + 1)) on $SLURM_JOB_NODELIST, logs in $logs"',
        "",
        *_environment(job),
        # After the set-up: what modules source does not always bear it.
        "set -u",
        *_arguments(job),
        *_command(job),
        "",
        _SUPERVISE,
    ]
    return "\n".join(parts)


def options(job: Job) -> list[str]:
    """Options of sbatch, quoted for #SBATCH lines, one a string."""
    slurm = job.cluster.slurm
    preset = presets.node(job.cluster)
    cpus = slurm.cpus_per_task or (preset.cpus if preset is not None else None)
    logs = str(slurm.log_dir) if slurm.log_dir is not None else LOG_DIR
    wanted: list[tuple[str, object]] = [
        ("job-name", job.name),
        ("nodes", job.cluster.nodes),
        ("ntasks-per-node", 1),
        ("gpus-per-node", job.gpus or None),
        ("cpus-per-task", cpus),
        ("mem", slurm.mem or (preset.mem if preset is not None else None)),
        ("exclusive", slurm.exclusive),
        ("time", slurm.time),
        ("signal", f"B:USR1@{slurm.signal_seconds}"),
        ("requeue", True),
        ("open-mode", "append"),
        ("comment", COMMENT + quote(logs)),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("constraint", slurm.constraint),
        ("exclude", slurm.exclude),
        ("reservation", slurm.reservation),
        ("array", f"0-{len(job.seeds) - 1}" if job.seeds else None),
        ("dependency", f"afterok:{job.after}" if job.after else None),
        ("kill-on-invalid-dep", "yes" if job.after else None),
    ]
    lines = []
    for name, value in wanted:
        if value is True:
            lines.append(f"--{name}")
        elif value is not None and value is not False:
            lines.append(f"--{name}={sbatch_quote(str(value))}")
    for option in slurm.extra:
        name, equals, text = option.partition("=")
        lines.append(f"{name}={sbatch_quote(text)}" if equals else option)
    return lines


def sbatch_quote(text: str) -> str:
    """A value as an #SBATCH line wants it: sbatch parts words as a shell does, but expands nothing."""
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def log_directory(comment: str) -> str | None:
    """Directory of the logs that a job's comment tells, relative to its working directory; None: not ours."""
    return unquote(comment[len(COMMENT) :]) if comment.startswith(COMMENT) else None


def _environment(job: Job) -> list[str]:
    slurm = job.cluster.slurm
    lines = [f"export {name}={shlex.quote(value)}" for name, value in presets.environment(job.cluster).items()]
    if slurm.cpus_per_task or presets.node(job.cluster) is not None:
        # Since 22.05 srun does not take the job's --cpus-per-task by itself.
        lines.append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK")
    if slurm.venv is not None:
        lines.append(f"export VIRTUAL_ENV={shlex.quote(str(slurm.venv))}")
        lines.append("export PATH=$VIRTUAL_ENV/bin:$PATH")
    lines += slurm.setup
    return [*lines, ""] if lines else []


def _arguments(job: Job) -> list[str]:
    """The launcher's arguments: of the command line, else a file with the configuration below."""
    text = run_yaml(job.config)
    end = "HIERA_TRAIN_CONFIG"
    while end in text.splitlines():
        end += "_"
    lines = [
        "if (($#)); then",
        '    arguments=(--config "$@")',
        "else",
        '    arguments=(--config "$logs/run.yaml")',
        # Written beside and renamed: after a requeue, a node of the former start may still read it.
        f'    cat >"$logs/.run.yaml" <<\'{end}\' && mv "$logs/.run.yaml" "$logs/run.yaml"',
        text + end,
        "fi",
    ]
    if job.seeds:
        # In overrides `$` begins a variable and `$$` is the character.
        run_dir = shlex.quote(str(job.run_dir).replace("$", "$$"))
        lines += [
            f"seeds=({' '.join(map(str, job.seeds))})",
            "seed=${seeds[$SLURM_ARRAY_TASK_ID]}",
            f'arguments+=(--set "run.seed=$seed" --set run.dir={run_dir}-seed"$seed")',
        ]
    return [*lines, ""]


def _command(job: Job) -> list[str]:
    slurm = job.cluster.slurm
    srun = [
        "srun",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--export=ALL",
    ]
    launcher = ["hiera-train", "run", '"${arguments[@]}"']
    if slurm.container == "none":
        return _array([*srun, *_task(), *launcher])
    image = shlex.quote(str(job.cluster.image))
    # What is mounted has to be there: here what the nodes share, on each node the cache, which may be on its own disk.
    shared = [job.run_dir.parent if job.config.run.dir is not None else None, job.config.runtime.cache_seed]
    lines = [f"mkdir -p {shlex.quote(str(path))}" for path in shared if path is not None]
    lines += _mounts(job)
    cache = job.config.runtime.cache_dir
    make_cache = f"mkdir -p {shlex.quote(str(cache))}" if cache is not None and cache.is_absolute() else None
    if slurm.container == "pyxis":
        # The task's shell runs in the container as well; pyxis parts mounts at commas.
        container = [
            f"--container-image={image}",
            '--container-mounts="$(IFS=,; echo "${mounts[*]}")"',
            '--container-workdir="$PWD"',
            "--no-container-mount-home",
        ]
        if make_cache is not None:
            # Where it fails, so does the container, which is counted.
            lines.append(f"srun --ntasks-per-node=1 {make_cache}")
        return [*lines, *_array([*srun, *container, *_task(), *launcher])]
    gpu = ["--nv"] if job.gpus else []
    apptainer = ["apptainer", "exec", *gpu, '"${mounts[@]/#/--bind=}"', '--pwd="$PWD"', image]
    return [*lines, *_array([*srun, *_task(make_cache), *apptainer, *launcher])]


def _task(first: str | None = None) -> list[str]:
    """Words before the launcher's; `first` has to succeed on the node before it."""
    text = _TASK.format(first=f"{first} && " if first is not None else "")
    return ["bash", "-c", shlex.quote(text), "hiera-train-task", '"$logs"']


def _mounts(job: Job) -> list[str]:
    """Lines of the script that collect the mounts, those that the configuration needs after those of cluster.slurm.

    Of one target some runtimes take the first mount and others the last, and a read-only mount hides what is
    mounted below it before: hence no target twice, and what holds a directory that is written is writable.
    """
    config, given = job.config, job.cluster.slurm.mounts
    # Its parent: the directory itself is made by the run, and an array makes several.
    runs = config.run.dir.parent if config.run.dir is not None else None
    written = _absolute(runs, config.runtime.cache_dir, config.runtime.cache_seed)
    read = _absolute(config.data.path, config.data.val_path, config.train.init_from)
    closed = [path for path in read if not any(below.is_relative_to(path) for below in written)]
    taken = {Path(mount.split(":")[1]) for mount in given}
    words = ['"$PWD:$PWD"', '"$logs:$logs"', *map(shlex.quote, given)]
    for path in dict.fromkeys(written + read):
        if path not in taken:
            mode = f'"$(mode {shlex.quote(str(path))})"' if path in closed else ""
            words.append(shlex.quote(f"{path}:{path}") + mode)
    lines = _array(words, "mounts")
    if any('"$(mode ' in word for word in words):
        # The directory of submission is known to the script alone.
        lines.insert(0, 'mode() { [[ $PWD/ == "$1"/* || $logs/ == "$1"/* ]] || echo :ro; }')
    return lines


def _absolute(*paths: Path | None) -> list[Path]:
    return [path for path in paths if path is not None and path.is_absolute()]


def _array(words: list[str], name: str = "command") -> list[str]:
    return [f"{name}=(", *(f"    {word}" for word in words), ")"]

"""The run store: the only package that knows the layout of `runs/`.

    runs/<experiment>/experiment.json         resolved recipe, planned runs, hash of the compare block
    runs/<experiment>/reference.json          a copy of the frozen ensemble that the recipe names, if any
    runs/<experiment>/launcher.lock           who launches it now
    runs/<experiment>/git-<hash>.diff         uncommitted changes of its code (record_diff)
    runs/<experiment>/<arm>/seed-<k>[-aa<j>]/
        config.json       {experiment, arm, seed, rerun,             written by the launcher, once
                           initial_weights, config: resolved}
        launch.json       commit; process, devices, exit code of  written by the launcher
                           every start, and how it saw it end
        attempts/0001.json  one start of the job: its process,       written by that job alone
                           status, and how it says that it ended
        environment.json  versions, devices, precision; hashes of    written by the job, at every start
                           prompts and initial weights
        heartbeat.json    step, time, pid; of a command also the     written by the job, every step
                           silence after which it is ended
        nodes/0000.json   activity of a node's ranks, whether they   written by the node's agent, every 15 s
                           are alive, and where they hang if not
        nodes/ending-*.json  how a node's part of the run ended      written by the node's agent, last
        result.json       the run is finished                        written by the job, last
        metrics.jsonl     one line a step                            appended by the job
        events.jsonl      started, resumed, checkpoint, failed, ...  appended by the job
        validation.jsonl  one line a validation, prompt by prompt    appended by the job
        samples.jsonl     some completions of some steps             appended by the job
        stdout.log, checkpoints/
    runs/warm-starts/<hash>/                  a run directory, too: steps shared by all arms and seeds

Every file has one writer. A file is written to a temporary name and renamed, or appended to one line at a
time. A reader on any host of a shared file system therefore sees complete files and at most one torn last
line. Lines reach the disk before the checkpoint or result.json that depends on them, and files before their
names. The last key of a line, `crc32`, is a checksum of the bytes before it.
"""

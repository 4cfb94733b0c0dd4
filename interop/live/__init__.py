"""Live routes of real processes: ds4 and ds4py as coordinator and workers, in every mixture.

ds4 itself is not part of this project: anyone who has its programs gives the commands that start
them. Rows that need them and do not get them are shown as not run.

    matrix    ->  cluster     ->  judge      ->  table of __main__
    (rows)        (processes)     (verdicts)
                  commands        trace
"""

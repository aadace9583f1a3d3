"""What a server serves: its tokens and log probabilities exclude named hypotheses.

`hypotheses` says what each name stands for, `evidence` what the server's answers exclude, `run` is the job.
"""

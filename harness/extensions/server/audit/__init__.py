"""What a server serves: named hypotheses before its tokens and its log probabilities.

`hypotheses` says what each name stands for, `views` what each makes likely, `tokens` and `logprobs` what the server's
answers exclude, `run` is the job.
"""

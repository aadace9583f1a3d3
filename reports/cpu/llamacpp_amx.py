"""llama.cpp's AMX kernels end the process by SIGSEGV where g++ 12 compiled them. No harness: llama-cpp-python alone.

    python reports/cpu/llamacpp_amx.py FILE.gguf          # a quantised file: SIGSEGV
    python reports/cpu/llamacpp_amx.py FILE.gguf plain    # weights stay as they are in the file: no AMX

The cause is in llamacpp_amx.cpp, which needs no llama.cpp.
"""

import sys

import llama_cpp

llama_cpp.llama_backend_init()
params = llama_cpp.llama_model_default_params()
params.use_extra_bufts = sys.argv[2:] != ["plain"]
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
context = llama_cpp.llama_init_from_model(model, llama_cpp.llama_context_default_params())
tokens = (llama_cpp.llama_token * 8)(*range(3, 11))
print("status", llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, 8)))

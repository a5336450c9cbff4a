"""The one model class that SGLang needs for the tiny model (``SGLANG_EXTERNAL_MODEL_PACKAGE``).

With an external package SGLang leaves its own two hundred model modules unimported until one of them is asked for,
which saves much of the start and some memory. Other models than the tiny one still load.
"""

//! Seeds of the parsers of request bodies and configuration files.

use super::{Seeds, numbered};

/// Bodies of every HTTP API, accepted and refused.
pub fn http_json() -> Seeds {
    numbered(&[
        r#"{"messages": [{"role": "user", "content": "Hi"}]}"#,
        r#"{"model": "m", "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}], "max_completion_tokens": 7, "temperature": 0.7, "top_p": 0.9, "n": 2, "stop": ["x", "y"], "seed": -1, "stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}}"#,
        r#"{"messages": [{"role": "assistant", "content": null, "tool_calls": []}, {"role": "developer", "content": "\u00e9\ud83d\ude42"}], "logprobs": true, "top_logprobs": 3, "logit_bias": {"3": 1.5, "9": -100}, "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "modalities": ["text"]}"#,
        r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}"#,
        r#"{"prompt": "Once", "max_tokens": 5, "echo": true, "logprobs": 2, "best_of": 1, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1}"#,
        r#"{"prompt": ["a", "b"], "add_special_tokens": false, "suffix": null, "user": "u", "unknown": [{"x": [[]]}]}"#,
        r#"{"prompt": [1, 2, 3], "prompt_logprobs": 1, "max_tokens": 0, "truncate_prompt_tokens": -1, "min_tokens": 1, "stop_token_ids": [4], "ignore_eos": true}"#,
        r#"{"prompt": [[1], [2, 3]], "allowed_token_ids": [1, 2], "bad_words": ["no"], "require_fingerprint": "0123456789abcdef"}"#,
        r#"{"input": "Hi", "instructions": "Be brief.", "max_output_tokens": 9, "include": ["message.output_text.logprobs"], "top_logprobs": 1, "text": {"format": {"type": "text"}}}"#,
        r#"{"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, {"type": "reasoning"}, {"type": "message", "role": "assistant", "content": "b"}], "tools": [{"type": "web_search"}], "previous_response_id": null}"#,
        r#"{"max_tokens": 16, "system": [{"type": "text", "text": "s"}], "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "thinking"}, {"type": "text", "text": "b"}]}, {"role": "user", "content": "c"}], "stop_sequences": ["x"], "top_k": 3, "output_config": {"format": null}, "thinking": {"type": "disabled"}}"#,
        r#"{"prompt": "a", "return_token_strs": true, "add_generation_prompt": true}"#,
        r#"{"tokens": [1, 2, 4294967295]}"#,
        r#"{"temperature": 1e400, "prompt": "a", "top_p": -0.0, "max_tokens": 4294967296, "seed": 18446744073709551615}"#,
        r#"{"messages": "hi", "messages": [{"role": "user", "content": "the last counts"}]}"#,
        "[1]",
        "{\"prompt\": \"\\ud800\"}",
    ])
}

/// Configuration files of the roles.
pub fn configuration() -> Seeds {
    numbered(&[
        "block_tokens = 32\nmax-sequences = 7\nkv-cache-bytes = \"64MiB\"\nheartbeat = \"250ms\"\n",
        "listen = \"127.0.0.1:8640\"\nworkers = [\"127.0.0.1:8650\", \"127.0.0.1:8651\"]\nqueue_requests_max = 100\nplacement = \"cost\"\n",
        "# comment\nmodel = \"/m\"\ntensor-parallel = 2\ndeterministic = true\npolicy = \"fair\"\nno-prefix-cache = false\n",
        "workers = 2\nport = 9000\nhttp-port = \"off\"\nverbose = true\ndrain-timeout = \"1m 30s\"\nusage-log = \"/tmp/u\"\n",
        "endpoint = [\"http://127.0.0.1:8640\"]\nconcurrency = [1, 2]\nrate = [2.5]\nduration = \"10s\"\nseed = 7\nprompt-tokens = \"16\"\n",
        "http-timings = true\nmessage-bytes-max = 1048576\naging-tokens-per-second = 2.5\nanonymous-weights = true\nusage-log-on-error = \"reject\"\n",
        "step-target = \"50ms\"\nslo-ttft = \"1s\"\nslo-gap = \"50ms\"\nlog = \"debug\"\nlog-format = \"json\"\ngpu = [0, 1]\ngpu-memory-utilization = 0.9\n",
        "max_sequence = 7\n",
        "max-sequences = \"many\"\n",
        "[table]\nx = 1\n",
        "max-sequences = 1979-05-27T07:32:00Z\n",
        "kv-cache-bytes = \"99999999999999999999EiB\"\n",
        "heartbeat = \"1e30d\"\n",
        "tensor-parallel = 4294967296\nthreads = -1\n",
    ])
}

/// Grammars: a byte for the kind, then the text.
pub fn grammars() -> Seeds {
    // Chains of names, as long as they may be and longer: no bracket shows their depth.
    let rules: String = (0..3_900).map(|link| format!("a{link}: a{} | \"y\"\n", link + 1)).collect();
    let terminals: String = (0..9_000).map(|link| format!("A{link}: A{}?\n", link + 1)).collect();
    let references: String = (0..4_000)
        .map(|link| format!(r##""{link}":{{"items":{{"$ref":"#/$defs/{}"}}}},"##, link + 1))
        .collect();
    let repeated = ".?".repeat(60_000);
    numbered(&[
        "o",
        r#"j{"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"enum": ["x", null]}}, "required": ["a"]}"#,
        r##"j{"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}"##,
        r#"j{"anyOf": [{"type": "string", "pattern": "^a+$", "maxLength": 5}, {"const": {"k": [1.5, true]}}]}"#,
        r#"j{"type": "string", "format": "date"}"#,
        "r(ab|c{2,5})+[^x]?\\d",
        "r\\p{L}+(, \\p{L}+)*",
        "cyes\nno\nmaybe \"so\"",
        "lstart: item+\nitem: /[a-z]+/ \"=\" NUMBER \"\\n\"\nNUMBER: /[0-9]+/",
        "lstart: %json {\"type\": \"boolean\"} | \"(\" start \")\"",
        &format!("lstart: a0\n{rules}a3900: \"x\"\n"),
        &format!("lstart: A0\n{terminals}A9000: \"x\"\n"),
        &format!(r##"j{{"$ref":"#/$defs/0","$defs":{{{references}"4000":{{}}}}}}"##),
        &format!("r{repeated}"),
    ])
}

/// Outputs of models: a byte for the format, then the text.
pub fn outputs() -> Seeds {
    numbered(&[
        "1<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": [1, {\"s\": \"}\"}]}}\n</tool_call>\nDone",
        r##"1a <tool_call>{"arguments": "{}", "name": "g"}<tool_call>{"name": 3}</tool_call>"##,
        "5<think>\nhm\n</think>\n\nYes <tool_call>{\"name\": \"f\"}",
        r##"0{"name": "f", "parameters": {"n": 1}}; {"name": "f"}"##,
        r##"0<|python_tag|>{"type": "function", "name": "f", "parameters": null}"##,
        r##"3[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "id": 7}]"##,
        r##"3[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"n": 1}[TOOL_CALLS]g{"s": "\u00e9"}"##,
        "2<tool_call>\n<function=f>\n<parameter=n>\n7\n</parameter>\n<parameter=s>\nnull\n</parameter>\n</function>\n</tool_call>",
        r##"2<tool_call><function=f><parameter=x>a</param</parameter><odd></function>"##,
        r##"=a</think>[TOOL_CALLS]x"##,
        r##"plain text {"name": 1}"##,
    ])
}

/// Tenants' files in TOML and JSON.
pub fn tenants() -> Seeds {
    let digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
    let key = format!("{{ name = \"ci\", sha256 = \"{digest}\", expires = \"2030-01-31T00:00:00Z\" }}");
    let whole = format!(
        "anonymous = \"guests\"\n[defaults]\nrequests_per_minute = 600\ntokens_per_minute = 1_000_000\n\
         tokens_per_day = 50_000_000\nconcurrent_requests = 64\nconnections = 32\nqueue_requests = 256\n\
         queue_tokens = 500_000\n[tenants.acme]\nlimits = {{ weight = 3, priority_max = 10 }}\nkeys = [{key}]\n\
         certificates = [\"spiffe://cluster/acme\", \"batch.acme.example\"]\n[tenants.guests]\n"
    );
    let json = format!(
        "{{\"anonymous\": null, \"defaults\": {{\"weight\": 2.5}}, \"tenants\": {{\"a\": {{\"keys\": [{{\"sha256\": \
         \"{digest}\"}}], \"limits\": {{\"priority_max\": -5}}}}, \"b\": {{}}}}}}"
    );
    let twice = format!("[tenants.a]\nkeys = [{key}, {key}]\n");
    let upper = format!("[tenants.a]\nkeys = [{{ sha256 = \"{}\" }}]\n", digest.to_uppercase());
    numbered(&[
        &whole,
        &json,
        &twice,
        &upper,
        "",
        "[tenants.t]\nlimits = { weight = 0 }\n",
        "[tenants.t]\nlimits = { requests_per_minute = 0 }\n",
        "[tenants.t]\nlimits = { weight = nan }\n",
        "anonymous = \"x\"\n",
        "[tenants.\"\"]\n",
        "[tenants.t]\nkeys = [{ sha256 = \"ab\", expires = \"soon\" }]\n",
    ])
}

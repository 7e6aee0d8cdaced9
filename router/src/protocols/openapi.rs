//! OpenAPI document of the HTTP APIs, from their routes and tables of fields.

use serde_json::{Map, Value, json};

use crate::layers::paths::{is_anthropic, is_open};
use crate::protocols::http::fields::{Fate, Field, FieldTable};
use crate::protocols::route::{Route, RouteMethod};

/// Returns the OpenAPI 3.1 document of these routes, in JSON.
pub(crate) fn document<'a, S: 'a>(routes: impl IntoIterator<Item = &'a Route<S>>) -> Vec<u8> {
    let (mut paths, mut schemas) = (Map::new(), Map::new());
    for name in ["OpenAIError", "AnthropicError"] {
        schemas.insert(name.to_owned(), error_schema(name == "AnthropicError"));
    }
    for route in routes {
        if let Some(table) = route.fields {
            schemas.insert(schema_name(table), body_schema(table));
        }
        let method = match route.method {
            RouteMethod::Get => "get",
            RouteMethod::Post => "post",
        };
        let path = paths.entry(documented_path(route.path)).or_insert_with(|| json!({}));
        path[method] = operation(route, method);
    }
    let document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Inflight",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "HTTP APIs of an Inflight router: those of OpenAI and Anthropic, and vLLM's endpoints for tokens. In a request, null is the same as an absent field, unknown fields have no effect, and an integer may be written as a number of a whole value.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}, {"apiKey": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "API key, with a tenants file."},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "API key, with a tenants file."},
            },
        },
    });
    // Strings, lists and maps of strings: serialization cannot fail.
    serde_json::to_vec(&document).unwrap_or_default()
}

/// Returns a path in OpenAPI's form of parameters.
fn documented_path(path: &str) -> String {
    path.replace("{*", "{")
}

/// Names of the parameters of a path.
fn parameters(path: &str) -> impl Iterator<Item = &str> {
    path.split('{').skip(1).filter_map(|rest| rest.split('}').next())
}

fn operation<S>(route: &Route<S>, method: &str) -> Value {
    let path = documented_path(route.path);
    let words =
        path.split(|character: char| !character.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let id = words.fold(method.to_owned(), |id, word| format!("{id}_{word}"));
    let content = |types: &[&str], schema: &Value| -> Map<String, Value> {
        types.iter().map(|media| ((*media).to_owned(), json!({"schema": schema}))).collect()
    };
    let mut success = json!({"description": "Success."});
    if !route.media.is_empty() {
        let any = json!({});
        success["content"] = content(route.media, &any).into();
    }
    let error = if is_anthropic(route.path) { "AnthropicError" } else { "OpenAIError" };
    let error = json!({"$ref": format!("#/components/schemas/{error}")});
    let mut operation = json!({
        "operationId": id,
        "summary": route.summary,
        "responses": {
            route.status.to_string(): success,
            "default": {"description": "Error.", "content": content(&["application/json"], &error)},
        },
    });
    let parameters: Vec<Value> = parameters(&path)
        .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}))
        .collect();
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    if let Some(table) = route.fields {
        let schema = json!({"$ref": format!("#/components/schemas/{}", schema_name(table))});
        operation["requestBody"] =
            json!({"required": true, "content": content(&["application/json"], &schema)});
    }
    if is_open(route.path) {
        operation["security"] = json!([]);
    }
    operation
}

/// Returns the name of a table's schema: `ChatCompletionsRequest`.
fn schema_name(table: &FieldTable) -> String {
    let words = table.api.split([' ', '_']);
    let capitalized = words.map(|word| {
        let (first, rest) = word.split_at(word.len().min(1));
        format!("{}{rest}", first.to_ascii_uppercase())
    });
    capitalized.collect::<String>() + "Request"
}

/// Fields that a body needs.
pub(crate) fn required(table: &FieldTable) -> &'static [&'static str] {
    match table.api {
        "chat completions" | "count_tokens" => &["messages"],
        "completions" => &["prompt"],
        "messages" => &["messages", "max_tokens"],
        "detokenize" => &["tokens"],
        _ => &[],
    }
}

fn body_schema(table: &FieldTable) -> Value {
    let known = table.iter().filter(|field| field.fate != Fate::Refused);
    let properties: Map<String, Value> =
        known.map(|field| (field.name.to_owned(), field_schema(table, field))).collect();
    let refused: Vec<&str> =
        table.iter().filter(|field| field.fate == Fate::Refused).map(|field| field.name).collect();
    let mut schema = json!({"type": "object", "properties": properties});
    if !required(table).is_empty() {
        schema["required"] = required(table).into();
    }
    if !refused.is_empty() {
        let refused = refused.join(", ");
        schema["description"] = format!("Refused unless null, false or empty: {refused}.").into();
    }
    schema
}

fn field_schema(table: &FieldTable, field: &Field) -> Value {
    if field.fate == Fate::Ignored {
        return json!({"description": format!("Ignored. {}", field.note)});
    }
    let mut types: Vec<&str> = types(table.api, field.name).to_vec();
    if !required(table).contains(&field.name) {
        types.push("null");
    }
    let mut schema = json!({"description": field.note, "type": types});
    if types.contains(&"array") {
        schema["items"] = json!({});
    }
    schema
}

/// Returns the JSON types of an honoured field.
pub(crate) fn types(api: &str, name: &str) -> &'static [&'static str] {
    match (api, name) {
        ("chat completions", "logprobs") => &["boolean"],
        (
            _,
            "add_generation_prompt"
            | "add_special_tokens"
            | "continue_final_message"
            | "echo"
            | "ignore_eos"
            | "parallel_tool_calls"
            | "parse_special"
            | "return_token_strs"
            | "stream",
        ) => &["boolean"],
        (
            _,
            "best_of"
            | "logprobs"
            | "max_completion_tokens"
            | "max_output_tokens"
            | "max_tokens"
            | "min_tokens"
            | "n"
            | "prompt_logprobs"
            | "seed"
            | "top_k"
            | "top_logprobs"
            | "truncate_prompt_tokens",
        ) => &["integer"],
        (
            _,
            "frequency_penalty" | "min_p" | "presence_penalty" | "repetition_penalty" | "temperature"
            | "top_p",
        ) => &["number"],
        ("tokenize", "prompt") => &["string"],
        (
            _,
            "ebnf"
            | "guided_grammar"
            | "guided_regex"
            | "instructions"
            | "model"
            | "reasoning_effort"
            | "regex"
            | "request_id"
            | "require_fingerprint",
        ) => &["string"],
        (_, "input" | "prompt" | "stop" | "stop_sequences" | "system") => &["string", "array"],
        (
            _,
            "allowed_token_ids" | "bad_words" | "guided_choice" | "include" | "messages" | "modalities"
            | "stop_token_ids" | "tokens" | "tools",
        ) => &["array"],
        ("messages" | "count_tokens", "tool_choice") => &["object"],
        (_, "grammar" | "tool_choice") => &["string", "object"],
        (_, "guided_json" | "json_schema") => &["object", "string", "boolean"],
        (
            _,
            "chat_template_kwargs"
            | "logit_bias"
            | "nvext"
            | "output_config"
            | "output_format"
            | "reasoning"
            | "response_format"
            | "stream_options"
            | "structured_outputs"
            | "text"
            | "thinking",
        ) => &["object"],
        _ => &[],
    }
}

/// Returns the schema of an error.
fn error_schema(anthropic: bool) -> Value {
    let text = json!({"type": "string"});
    let nullable = json!({"type": ["string", "null"]});
    if anthropic {
        return json!({
            "type": "object",
            "required": ["type", "error"],
            "properties": {
                "type": {"const": "error"},
                "error": {"type": "object", "required": ["type", "message"], "properties": {"type": text, "message": text}},
            },
        });
    }
    json!({
        "type": "object",
        "required": ["error"],
        "properties": {"error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": text, "type": text, "param": nullable, "code": nullable},
        }},
    })
}

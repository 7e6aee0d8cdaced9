//! The way of a request to the dispatcher, each step a type: a draft as its protocol has read it, checked, tokenized, admitted.

mod admitted;
pub(crate) mod admitted_call;
mod bad_words;
mod checked;
mod cold_start;
pub(crate) mod context;
pub(crate) mod cursor;
pub(crate) mod draft;
pub(crate) mod escapes;
mod grammar_check;
mod held;
pub(crate) mod ingress;
pub(crate) mod limits;
pub(crate) mod message_list;
pub(crate) mod output_plan;
mod prompt;
mod resources;
mod resumption;
mod stream_pool;
mod tokenized;
mod tokenizing;
pub(crate) mod tool_call;
pub(crate) mod tool_use;

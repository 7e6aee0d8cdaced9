//! The way of a request to the dispatcher, each step a type: a draft as its protocol has read it, checked, tokenized, admitted.

pub(crate) mod bad_words;
pub(crate) mod checked;
pub(crate) mod cold_start;
pub(crate) mod cursor;
pub(crate) mod draft;
pub(crate) mod grammar_check;
pub(crate) mod ingress;
pub(crate) mod message_list;
pub(crate) mod output_plan;
pub(crate) mod prompt;
pub(crate) mod tokenizing;
pub(crate) mod tool_call;
pub(crate) mod tool_use;

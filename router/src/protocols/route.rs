//! Route of the HTTP APIs: its handler, and what the OpenAPI document says of it.

use axum::routing::MethodRouter;

use crate::protocols::http::fields::FieldTable;

/// Media types of responses.
pub(crate) const JSON: &[&str] = &["application/json"];
pub(crate) const JSON_OR_EVENTS: &[&str] = &["application/json", "text/event-stream"];
pub(crate) const EVENTS: &[&str] = &["text/event-stream"];
pub(crate) const HTML: &[&str] = &["text/html"];
pub(crate) const TEXT: &[&str] = &["text/plain"];
pub(crate) const NOTHING: &[&str] = &[];

/// Part of the HTTP APIs that an option serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// The APIs of clients.
    Clients,
    /// `/metrics`, with `--http-metrics`.
    Metrics,
    /// The live view, with `--admin`.
    LiveView,
}

/// Method of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RouteMethod {
    Get,
    Post,
}

/// Route of the HTTP APIs, whose handlers have the state `S`.
#[derive(Debug)]
pub(crate) struct Route<S> {
    /// Path, with parameters in braces as axum writes them.
    pub(crate) path: &'static str,
    pub(crate) method: RouteMethod,
    /// What it does.
    pub(crate) summary: &'static str,
    pub(crate) part: Part,
    /// Fields of the request's body, if it has one.
    pub(crate) fields: Option<&'static FieldTable>,
    /// Status of a response without an error.
    pub(crate) status: u16,
    /// Media types of such a response.
    pub(crate) media: &'static [&'static str],
    pub(crate) handler: fn() -> MethodRouter<S>,
}

impl<S> Route<S> {
    /// Returns a route that reads.
    pub(crate) const fn get(
        path: &'static str,
        summary: &'static str,
        media: &'static [&'static str],
        handler: fn() -> MethodRouter<S>,
    ) -> Self {
        Self {
            path,
            method: RouteMethod::Get,
            summary,
            part: Part::Clients,
            fields: None,
            status: 200,
            media,
            handler,
        }
    }

    /// Returns a route that takes a body with these fields.
    pub(crate) const fn post(
        path: &'static str,
        summary: &'static str,
        fields: &'static FieldTable,
        media: &'static [&'static str],
        handler: fn() -> MethodRouter<S>,
    ) -> Self {
        Self {
            path,
            method: RouteMethod::Post,
            summary,
            part: Part::Clients,
            fields: Some(fields),
            status: 200,
            media,
            handler,
        }
    }

    /// Returns the route in another part.
    pub(crate) const fn of(mut self, part: Part) -> Self {
        self.part = part;
        self
    }

    /// Returns the route with another method, and the status of its responses.
    pub(crate) const fn by(mut self, method: RouteMethod, status: u16) -> Self {
        self.method = method;
        self.status = status;
        self
    }
}

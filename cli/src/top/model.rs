//! State of `inflight top`: updates, keys and the life of the followed request go in; what is to be drawn, and what the
//! shell is to do, come out.

use std::time::Duration;

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use inflight_proto::v1::{GetRequestResponse, LifeEvent, TenantView, WatchResponse};

use super::state::{ClusterState, Request, Worker, harmless_request, state_name};
use super::tables::{AGE, REQUESTS, Sorting, TENANTS};
use super::text::harmless;
use super::worker_table::WORKERS;

/// Maximum characters of a filter.
const FILTER_MAX: usize = 64;
/// Rows that Page Up and Page Down move by.
const PAGE: usize = 10;
/// Time without an update after which the display says so.
const SILENCE: Duration = Duration::from_secs(3);

/// What is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pane {
    /// Workers, tenants and requests.
    #[default]
    Overview,
    /// Workers.
    Workers,
    /// Tenants.
    Tenants,
    /// Requests.
    Requests,
    /// Findings of the diagnosis.
    Findings,
}

impl Pane {
    const ALL: [Self; 5] = [Self::Overview, Self::Workers, Self::Tenants, Self::Requests, Self::Findings];

    fn step(self, step: usize) -> Self {
        let at = Self::ALL.iter().position(|pane| *pane == self).unwrap_or(0);
        Self::ALL[(at + step) % Self::ALL.len()]
    }
}

/// State of the connection to the router.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Link {
    /// No update yet.
    #[default]
    Connecting,
    /// Updates arrive.
    Live,
    /// The router went away; the reason.
    Lost(String),
}

/// The followed request.
#[derive(Debug, Clone, PartialEq)]
pub struct Follow {
    /// Number of the request.
    pub number: u64,
    /// Life of the request; `None` until it was read.
    pub life: Option<GetRequestResponse>,
    /// Why its life could not be read the last time.
    pub error: Option<String>,
    /// Lines above the first one shown, counted from the end of the life; 0: the last events are shown.
    pub scrolled: usize,
}

/// Action of the terminal loop after a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Draws.
    Draw,
    /// Reads the life of the request with this number, and draws.
    Read(u64),
    /// Ends.
    Quit,
}

/// State of `inflight top`.
#[derive(Debug, Default)]
pub struct Model {
    live: ClusterState,
    /// State shown while the display is paused.
    frozen: Option<Box<ClusterState>>,
    /// Connection to the router.
    pub link: Link,
    /// Time since the last update.
    silence: Duration,
    /// What is shown.
    pub pane: Pane,
    /// Whether the help is shown.
    pub help: bool,
    /// The followed request, if one is.
    pub follow: Option<Follow>,
    /// Words that a request must have in its id, tenant, worker or state.
    pub filter: String,
    /// Whether keys edit the filter.
    pub editing: bool,
    /// Whether ended requests are listed.
    pub show_ended: bool,
    /// Order of the workers.
    pub worker_order: Sorting,
    /// Order of the tenants.
    pub tenant_order: Sorting,
    /// Order of the requests.
    pub request_order: Sorting,
    /// Number and row of the selected request.
    selected: (u64, usize),
    /// Rows above the first one of the tables of workers and tenants.
    pub scrolled: usize,
}

impl Model {
    /// Creates the model of a display that has no update yet.
    pub fn new() -> Self {
        Self {
            request_order: Sorting { column: AGE, reversed: false },
            tenant_order: Sorting { column: 1, reversed: false },
            ..Self::default()
        }
    }

    /// Applies an update. The `first` update of a watch replaces all requests of the previous watch.
    pub fn update(&mut self, update: WatchResponse, first: bool) {
        self.link = Link::Live;
        self.silence = Duration::ZERO;
        self.live.apply(update, first);
    }

    /// Notes that the router went away, and why.
    pub fn lost(&mut self, why: &str) {
        self.link = Link::Lost(harmless(why));
    }

    /// Takes the time since the last update.
    pub fn wait(&mut self, since_update: Duration) {
        self.silence = since_update;
    }

    /// Takes the life of a request, or why it could not be read.
    pub fn life(&mut self, number: u64, life: Result<GetRequestResponse, String>) {
        let Some(follow) = self.follow.as_mut().filter(|follow| follow.number == number) else { return };
        match life {
            Ok(life) => {
                let event = |event: LifeEvent| LifeEvent {
                    kind: harmless(&event.kind),
                    worker: harmless(&event.worker),
                    detail: harmless(&event.detail),
                    ..event
                };
                let request = life.request.map(harmless_request);
                let events = life.events.into_iter().map(event).collect();
                let (trace_id, trace_url) = (harmless(&life.trace_id), harmless(&life.trace_url));
                follow.life = Some(GetRequestResponse { request, events, trace_id, trace_url, ..life });
                follow.error = None;
            }
            Err(error) => follow.error = Some(harmless(&error)),
        }
    }

    /// State that is shown.
    pub fn state(&self) -> &ClusterState {
        self.frozen.as_deref().unwrap_or(&self.live)
    }

    /// Whether the display is paused.
    pub fn paused(&self) -> bool {
        self.frozen.is_some()
    }

    /// Time without an update, if it is long and the connection is not known to be lost.
    pub fn silence(&self) -> Option<Duration> {
        (self.link == Link::Live && self.silence >= SILENCE).then_some(self.silence)
    }

    /// Workers in their order.
    pub fn workers(&self) -> Vec<&Worker> {
        let mut rows: Vec<&Worker> = self.state().workers.iter().collect();
        self.worker_order.sort(&WORKERS, &mut rows, self.state());
        rows
    }

    /// Tenants in their order.
    pub fn tenants(&self) -> Vec<&TenantView> {
        let mut rows: Vec<&TenantView> = self.state().tenants.iter().collect();
        self.tenant_order.sort(&TENANTS, &mut rows, self.state());
        rows
    }

    /// Requests that match the filter, in their order.
    pub fn requests(&self) -> Vec<&Request> {
        let words: Vec<String> = self.filter.split_whitespace().map(str::to_lowercase).collect();
        let wanted = |request: &&Request| {
            (self.show_ended || !request.ended()) && words.iter().all(|word| matches(request, word))
        };
        let mut rows: Vec<&Request> = self.state().requests.values().filter(wanted).collect();
        self.request_order.sort(&REQUESTS, &mut rows, self.state());
        rows
    }

    /// Row of the selected request among `rows`; if it is gone, the row that took its place.
    pub fn selection(&self, rows: &[&Request]) -> Option<usize> {
        let (number, row) = self.selected;
        let at = rows.iter().position(|request| request.view.number == number);
        at.or_else(|| rows.len().checked_sub(1).map(|last| row.min(last)))
    }

    /// Handles a key.
    pub fn key(&mut self, key: KeyEvent) -> Action {
        if key.kind == KeyEventKind::Release {
            return Action::Draw;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c' | 'd') => Action::Quit,
                KeyCode::Char('u') if self.editing => {
                    self.filter.clear();
                    Action::Draw
                }
                _ => Action::Draw,
            };
        }
        if self.editing {
            self.edit(key.code);
            return Action::Draw;
        }
        match key.code {
            KeyCode::Char('q') => return Action::Quit,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.help = !self.help,
            KeyCode::Esc => self.close(),
            KeyCode::Enter if self.follow.is_some() => self.follow = None,
            KeyCode::Enter if !self.help => return self.follow_selected(),
            KeyCode::Char('p' | ' ') => self.pause(),
            KeyCode::Tab => self.show(self.pane.step(1)),
            KeyCode::BackTab => self.show(self.pane.step(Pane::ALL.len() - 1)),
            KeyCode::Char(digit @ '1'..='5') => self.show(Pane::ALL[digit as usize - '1' as usize]),
            KeyCode::Char('/') => {
                (self.editing, self.help, self.follow) = (true, false, None);
                if !matches!(self.pane, Pane::Overview | Pane::Requests) {
                    self.pane = Pane::Requests;
                }
            }
            KeyCode::Char('e') => self.show_ended = !self.show_ended,
            KeyCode::Char('s') => self.sort(1),
            KeyCode::Char('S') => self.sort(-1),
            KeyCode::Char('r') => {
                if let Some((order, _)) = self.order() {
                    order.reversed = !order.reversed;
                }
            }
            KeyCode::Up | KeyCode::Char('k') => self.scroll(-1),
            KeyCode::Down | KeyCode::Char('j') => self.scroll(1),
            KeyCode::PageUp => self.scroll(-(PAGE as isize)),
            KeyCode::PageDown => self.scroll(PAGE as isize),
            KeyCode::Home | KeyCode::Char('g') => self.scroll(isize::MIN),
            KeyCode::End | KeyCode::Char('G') => self.scroll(isize::MAX),
            _ => {}
        }
        Action::Draw
    }

    /// Takes text that was pasted: it is of use in the filter only.
    pub fn paste(&mut self, text: &str) {
        if self.editing {
            text.chars().for_each(|character| self.edit(KeyCode::Char(character)));
        }
    }

    fn edit(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => self.editing = false,
            KeyCode::Esc => {
                self.editing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(character)
                if !character.is_control() && self.filter.chars().count() < FILTER_MAX =>
            {
                self.filter.push(character);
            }
            _ => {}
        }
        self.selected = (0, 0);
    }

    /// Closes what was opened last: help, the followed request, the filter.
    fn close(&mut self) {
        if self.help {
            self.help = false;
        } else if self.follow.is_some() {
            self.follow = None;
        } else {
            self.filter.clear();
        }
    }

    fn show(&mut self, pane: Pane) {
        (self.pane, self.help, self.follow, self.scrolled) = (pane, false, None, 0);
    }

    fn pause(&mut self) {
        self.frozen = match self.frozen.take() {
            Some(_) => None,
            None => Some(Box::new(self.live.clone())),
        };
    }

    fn follow_selected(&mut self) -> Action {
        if !matches!(self.pane, Pane::Overview | Pane::Requests) {
            return Action::Draw;
        }
        let rows = self.requests();
        let Some((at, request)) = self.selection(&rows).and_then(|at| Some((at, rows.get(at)?))) else {
            return Action::Draw;
        };
        let number = request.view.number;
        self.selected = (number, at);
        self.follow = Some(Follow { number, life: None, error: None, scrolled: 0 });
        Action::Read(number)
    }

    /// Order of the table that keys sort, and its number of columns; `None` without a table.
    fn order(&mut self) -> Option<(&mut Sorting, usize)> {
        match self.pane {
            Pane::Workers => Some((&mut self.worker_order, WORKERS.len())),
            Pane::Tenants => Some((&mut self.tenant_order, TENANTS.len())),
            Pane::Overview | Pane::Requests => Some((&mut self.request_order, REQUESTS.len())),
            Pane::Findings => None,
        }
    }

    fn sort(&mut self, step: isize) {
        if let Some((order, columns)) = self.order() {
            order.step(step, columns);
        }
    }

    fn scroll(&mut self, by: isize) {
        if let Some(follow) = &mut self.follow {
            // Up shows earlier events.
            let events = follow.life.as_ref().map_or(0, |life| life.events.len());
            follow.scrolled = follow.scrolled.saturating_add_signed(by.saturating_neg()).min(events);
            return;
        }
        let rows = match self.pane {
            Pane::Workers => self.state().workers.len(),
            Pane::Tenants => self.state().tenants.len(),
            Pane::Findings => self.state().diagnosis.as_ref().map_or(0, |found| found.findings.len()),
            Pane::Overview | Pane::Requests => {
                let rows = self.requests();
                let from = self.selection(&rows).unwrap_or(0);
                let to = from.saturating_add_signed(by).min(rows.len().saturating_sub(1));
                let number = rows.get(to).map_or(0, |request| request.view.number);
                self.selected = (number, to);
                return;
            }
        };
        self.scrolled = self.scrolled.saturating_add_signed(by).min(rows.saturating_sub(1));
    }
}

/// Whether a request has a lower-case word in its id, tenant, worker or state.
fn matches(request: &Request, word: &str) -> bool {
    let view = &request.view;
    let texts = [view.request_id.as_str(), &view.tenant, &view.worker, state_name(view.state())];
    texts.iter().any(|text| text.to_lowercase().contains(word))
}

//! Draws the state of `inflight top` on a terminal of any size.

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

use super::findings;
use super::header;
use super::life;
use super::model::{Follow, Link, Model, Pane};
use super::tables::{Column, REQUESTS, Sorting, TENANTS, Tone, arrange, cells, titles};
use super::text::{fit, harmless, pad, span, width};
use super::worker_table::WORKERS;

/// Width from which the names of the panes are shown.
const WIDE: usize = 72;
/// Width from which all of them are.
const WIDEST: usize = 88;
/// Rows of the body from which the overview shows workers, and tenants too.
const ROWS_FOR_WORKERS: usize = 6;
const ROWS_FOR_TENANTS: usize = 9;

/// Keys and what they do.
const HELP: [(&str, &str); 12] = [
    ("q, Ctrl-C", "quit"),
    ("Tab, 1 to 5", "overview, workers, tenants, requests, findings"),
    ("↑ ↓, j k", "select a request, or scroll"),
    ("PgUp PgDn", "ten rows; Home, End: first, last"),
    ("Enter", "follow the request; Enter or Esc: back"),
    ("s, S", "sort by the next, previous column"),
    ("r", "reverse the order"),
    ("/", "filter by id, tenant, worker, state"),
    ("Esc", "close, or clear the filter"),
    ("e", "list ended requests too, or not"),
    ("p, Space", "pause the display, or continue"),
    ("?", "this help"),
];

/// Draws a frame.
pub fn draw(frame: &mut Frame<'_>, model: &Model) {
    let area = frame.area();
    let mut page = Page { buffer: frame.buffer_mut(), area };
    let (rows, columns) = (page.rows(), page.columns());
    if rows == 0 || columns == 0 {
        return;
    }
    title(&mut page, model);
    let mut top = 1;
    if let Link::Lost(why) = &model.link {
        page.text(top, &format!("{why}; connecting again"), style(Tone::Bad));
        top += 1;
    }
    let footer = rows.saturating_sub(1);
    if model.help {
        help(&mut page, top, footer);
    } else if let Some(follow) = &model.follow {
        follow_pane(&mut page, model, follow, top, footer);
    } else {
        for line in header::lines(model.state(), columns).into_iter().take(rows / 3) {
            page.text(top, &line, Style::default());
            top += 1;
        }
        body(&mut page, model, top, footer);
    }
    if footer > 1 {
        foot(&mut page, model, footer);
    }
}

/// Part of a buffer that takes lines of text; what is outside is not drawn.
struct Page<'a> {
    buffer: &'a mut Buffer,
    area: Rect,
}

impl Page<'_> {
    fn rows(&self) -> usize {
        self.area.height.into()
    }

    fn columns(&self) -> usize {
        self.area.width.into()
    }

    fn text(&mut self, row: usize, text: &str, style: Style) {
        self.text_at(row, 0, text, style);
    }

    fn text_at(&mut self, row: usize, column: usize, text: &str, style: Style) {
        if row >= self.rows() || column >= self.columns() {
            return;
        }
        let space = self.columns() - column;
        // Both are within the area, whose sides are u16.
        let (x, y) = (self.area.x + column as u16, self.area.y + row as u16);
        self.buffer.set_stringn(x, y, fit(text, space), space, style);
    }

    /// Sets the style of a whole row.
    fn row_style(&mut self, row: usize, style: Style) {
        if row < self.rows() {
            let y = self.area.y + row as u16;
            self.buffer.set_style(Rect { y, height: 1, ..self.area }, style);
        }
    }
}

fn style(tone: Tone) -> Style {
    match tone {
        Tone::Plain => Style::default(),
        Tone::Dim => Style::default().add_modifier(Modifier::DIM),
        Tone::Decode => Style::default().fg(Color::Green),
        Tone::Prefill => Style::default().fg(Color::Cyan),
        Tone::Wait => Style::default().fg(Color::Yellow),
        Tone::Bad => Style::default().fg(Color::Red).add_modifier(Modifier::BOLD),
    }
}

/// The first line: the panes, and the state of the display.
fn title(page: &mut Page<'_>, model: &Model) {
    let columns = page.columns();
    let status = match (&model.link, model.silence()) {
        _ if model.paused() => "PAUSED".to_owned(),
        (Link::Connecting, _) => "connecting".to_owned(),
        (Link::Lost(_), _) => "DISCONNECTED".to_owned(),
        (Link::Live, Some(silence)) => format!("no update for {}", span(silence)),
        (Link::Live, None) => clock(model.state().unix_ms),
    };
    let panes = [
        (Pane::Overview, "1 overview"),
        (Pane::Workers, "2 workers"),
        (Pane::Tenants, "3 tenants"),
        (Pane::Requests, "4 requests"),
        (Pane::Findings, "5 findings"),
    ];
    let mut left = "inflight top".to_owned();
    for (pane, name) in panes {
        if model.pane == pane {
            left.push_str(&format!("  [{name}]"));
        } else if columns >= if pane == Pane::Findings { WIDEST } else { WIDE } {
            left.push_str(&format!("  {name}"));
        }
    }
    let space = columns.saturating_sub(width(&status) + 1);
    page.text(0, &format!("{} {status}", pad(&left, space, false)), Style::default());
    page.row_style(0, Style::default().add_modifier(Modifier::REVERSED));
}

/// Time of day, in UTC.
fn clock(unix_ms: u64) -> String {
    let seconds = unix_ms / 1000 % 86_400;
    format!("{:02}:{:02}:{:02} UTC", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// The last line: the filter while it is edited, or what is listed and the keys.
fn foot(page: &mut Page<'_>, model: &Model, row: usize) {
    if model.editing {
        page.text(
            row,
            &format!("filter: {}▏ (Enter: done, Esc: clear)", harmless(&model.filter)),
            Style::default(),
        );
        return;
    }
    let mut text = String::new();
    if matches!(model.pane, Pane::Overview | Pane::Requests) && model.follow.is_none() && !model.help {
        let (state, listed) = (model.state(), model.requests().len());
        let open = (state.cluster.open_requests as usize).max(state.open());
        text = format!("{listed} of {open} requests");
        if !model.filter.is_empty() {
            text.push_str(&format!(" with {:?}", harmless(&model.filter)));
        }
        text.push_str("  ");
    }
    text.push_str("?:help q:quit Tab:pane /:filter s:sort r:reverse Enter:follow p:pause e:ended");
    page.text(row, &text, style(Tone::Dim));
}

fn help(page: &mut Page<'_>, top: usize, bottom: usize) {
    for (row, (keys, meaning)) in (top..bottom).zip(HELP) {
        page.text(row, &format!("{} {meaning}", pad(keys, 12, false)), Style::default());
    }
}

fn follow_pane(page: &mut Page<'_>, model: &Model, follow: &Follow, top: usize, bottom: usize) {
    let text = life::text(follow, model.state(), page.columns());
    let mut row = top;
    // The events have at least half of the rows.
    let head = text.head.len().min(bottom.saturating_sub(top).div_ceil(2));
    for (line, tone) in text.head.iter().take(head) {
        page.text(row, line, style(*tone));
        row += 1;
    }
    let space = bottom.saturating_sub(row);
    let last = text.events.len().saturating_sub(follow.scrolled).max(space.min(text.events.len()));
    for (line, tone) in &text.events[last.saturating_sub(space)..last] {
        page.text(row, line, style(*tone));
        row += 1;
    }
}

/// The tables of a pane, between two rows.
fn body(page: &mut Page<'_>, model: &Model, top: usize, bottom: usize) {
    let space = bottom.saturating_sub(top);
    match model.pane {
        Pane::Overview => {
            let (workers, tenants) = (model.workers(), model.tenants());
            // A table has a line of titles; the requests have at least half of the space.
            let part =
                |wanted: usize, from: usize| if space < from { 0 } else { wanted.min((space / 4).max(2)) };
            let rows = part(1 + workers.len(), ROWS_FOR_WORKERS);
            table(page, model, &WORKERS, &workers, model.worker_order, Span { top, rows, first: 0 });
            let top = top + rows;
            let rows = part(1 + tenants.len(), ROWS_FOR_TENANTS);
            table(page, model, &TENANTS, &tenants, model.tenant_order, Span { top, rows, first: 0 });
            requests(page, model, top + rows, bottom);
        }
        Pane::Workers => {
            let span = Span { top, rows: space, first: model.scrolled };
            table(page, model, &WORKERS, &model.workers(), model.worker_order, span);
        }
        Pane::Tenants => {
            let span = Span { top, rows: space, first: model.scrolled };
            table(page, model, &TENANTS, &model.tenants(), model.tenant_order, span);
        }
        Pane::Requests => requests(page, model, top, bottom),
        Pane::Findings => {
            let texts = findings::text(model.state().diagnosis.as_ref(), page.columns());
            let lines = texts.into_iter().skip(model.scrolled).flatten();
            for (row, (line, tone)) in (top..bottom).zip(lines) {
                page.text(row, &line, style(tone));
            }
        }
    }
}

/// Rows of a page that a table takes, titles included, and the first of its own rows.
#[derive(Debug, Clone, Copy)]
struct Span {
    top: usize,
    rows: usize,
    first: usize,
}

/// Draws the requests with the selected one in the middle, where there are more than fit.
fn requests(page: &mut Page<'_>, model: &Model, top: usize, bottom: usize) {
    let rows = model.requests();
    let space = bottom.saturating_sub(top);
    let shown = space.saturating_sub(1);
    let selected = model.selection(&rows);
    let first = selected.map_or(0, |at| at.saturating_sub(shown / 2)).min(rows.len().saturating_sub(shown));
    table(page, model, &REQUESTS, &rows, model.request_order, Span { top, rows: space, first });
    if let Some(at) = selected.filter(|at| *at >= first && at - first < shown) {
        page.row_style(top + 1 + at - first, Style::default().add_modifier(Modifier::REVERSED));
    }
    if rows.is_empty() && shown > 0 {
        let nothing = if model.filter.is_empty() { "no requests" } else { "no request matches the filter" };
        page.text(top + 1, nothing, style(Tone::Dim));
    }
}

/// Draws a table; the last row says how many more there are.
fn table<R>(
    page: &mut Page<'_>,
    model: &Model,
    columns: &[Column<R>],
    rows: &[&R],
    sorting: Sorting,
    span: Span,
) {
    let Span { top, rows: space, first } = span;
    if space == 0 {
        return;
    }
    let arranged = arrange(columns, page.columns());
    let line = titles(&arranged, columns, sorting).join(" ");
    page.text(top, &line, Style::default().add_modifier(Modifier::BOLD | Modifier::UNDERLINED));
    let shown = rows.get(first..).unwrap_or_default();
    for (row, item) in (top + 1..top + space).zip(shown) {
        let mut at = 0;
        for ((text, tone), (_, width)) in cells(&arranged, item, model.state()).into_iter().zip(&arranged) {
            page.text_at(row, at, &text, style(tone));
            at += width + 1;
        }
    }
    let hidden = shown.len().saturating_sub(space - 1);
    if hidden > 0 && space > 3 {
        page.row_style(top + space - 1, Style::reset());
        let more = format!("… {} more", hidden + 1);
        page.text(top + space - 1, &pad(&more, page.columns(), false), style(Tone::Dim));
    }
}

//! Tables of tenants and requests: their columns, which of them fit a width, and the order of their rows.

use std::cmp::Ordering;

use inflight_proto::v1::{RequestState, TenantView};

use super::state::{ClusterState, Request, state_name};
use super::text::{bar, count, pad, percent, rate, span};

/// How a cell is highlighted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// Not at all.
    Plain,
    /// Of little importance.
    Dim,
    /// Generating.
    Decode,
    /// Computing a prompt.
    Prefill,
    /// Waiting.
    Wait,
    /// Something is wrong.
    Bad,
}

/// Column of a table with rows of type `R`.
pub struct Column<R> {
    /// Title.
    pub title: &'static str,
    /// Width, or minimum width if it grows.
    pub width: usize,
    /// Maximum width.
    pub grows_to: usize,
    /// Whether the column is right-aligned.
    pub right: bool,
    /// Importance: 0 is shown first where not all columns fit.
    pub rank: u8,
    /// Whether the greatest value comes first.
    pub descending: bool,
    /// Text of a row in so many columns.
    pub text: fn(&R, &ClusterState, usize) -> String,
    /// Order of two rows, ascending.
    pub order: fn(&R, &R, &ClusterState) -> Ordering,
    /// Highlight of a row.
    pub tone: fn(&R) -> Tone,
}

/// Order of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sorting {
    /// Index of the column.
    pub column: usize,
    /// Whether the column's own direction is reversed.
    pub reversed: bool,
}

impl Sorting {
    /// Moves to another column, by `step` of `columns`.
    pub fn step(&mut self, step: isize, columns: usize) {
        let columns = columns.max(1) as isize;
        let next = (self.column as isize + step).rem_euclid(columns);
        *self = Self { column: next as usize, reversed: false };
    }

    /// Sorts rows; rows that are equal keep their order.
    pub fn sort<R>(self, columns: &[Column<R>], rows: &mut [&R], state: &ClusterState) {
        let Some(column) = columns.get(self.column) else { return };
        let descending = column.descending != self.reversed;
        rows.sort_by(|a, b| {
            let order = (column.order)(a, b, state);
            if descending { order.reverse() } else { order }
        });
    }
}

/// Returns the columns that fit into `width` with a space between them, in the table's order, each with its width.
pub fn arrange<R>(columns: &[Column<R>], width: usize) -> Vec<(&Column<R>, usize)> {
    let mut ranked: Vec<usize> = (0..columns.len()).collect();
    ranked.sort_by_key(|at| columns[*at].rank);
    let mut chosen = Vec::new();
    let mut used = 0;
    for at in ranked {
        let with = used + columns[at].width + usize::from(!chosen.is_empty());
        if with > width && !chosen.is_empty() {
            continue;
        }
        used = with;
        chosen.push(at);
    }
    chosen.sort_unstable();
    let mut left = width.saturating_sub(used);
    let arranged = chosen.into_iter().map(|at| {
        let column = &columns[at];
        let more = left.min(column.grows_to.saturating_sub(column.width));
        left -= more;
        (column, (column.width + more).min(width))
    });
    arranged.collect()
}

/// Returns the titles of arranged columns, the sorted one with its direction.
pub fn titles<R>(arranged: &[(&Column<R>, usize)], columns: &[Column<R>], sorting: Sorting) -> Vec<String> {
    let title = |(column, width): &(&Column<R>, usize)| {
        let sorted = columns.get(sorting.column).is_some_and(|sorted| sorted.title == column.title);
        let mark = match (sorted, column.descending != sorting.reversed) {
            (false, _) => "",
            (true, true) => "▼",
            (true, false) => "▲",
        };
        pad(&format!("{}{mark}", column.title), *width, column.right)
    };
    arranged.iter().map(title).collect()
}

/// Returns the cells of a row in arranged columns.
pub fn cells<R>(arranged: &[(&Column<R>, usize)], row: &R, state: &ClusterState) -> Vec<(String, Tone)> {
    let cell = |(column, width): &(&Column<R>, usize)| {
        (pad(&(column.text)(row, state, *width), *width, column.right), (column.tone)(row))
    };
    arranged.iter().map(cell).collect()
}

/// No highlight.
pub(super) fn plain<R>(_: &R) -> Tone {
    Tone::Plain
}

/// A tenant's share as a bar, on which `|` is its fair share.
fn share_bar(tenant: &TenantView, _: &ClusterState, width: usize) -> String {
    let mut symbols: Vec<char> = bar(&[(tenant.share, '█')], '·', width).chars().collect();
    let fair = if tenant.fair_share.is_finite() { tenant.fair_share.clamp(0.0, 1.0) } else { 0.0 };
    let at = ((fair * width as f64).round() as usize).min(width.saturating_sub(1));
    if let Some(symbol) = symbols.get_mut(at) {
        *symbol = '|';
    }
    symbols.into_iter().collect()
}

/// Columns of the table of tenants.
pub static TENANTS: [Column<TenantView>; 9] = [
    Column {
        title: "TENANT",
        width: 8,
        grows_to: 24,
        right: false,
        rank: 0,
        descending: false,
        text: |tenant, _, _| {
            if tenant.tenant.is_empty() { "(none)".to_owned() } else { tenant.tenant.clone() }
        },
        order: |a, b, _| a.tenant.cmp(&b.tenant),
        tone: plain,
    },
    Column {
        title: "SERVICE/s",
        width: 10,
        grows_to: 10,
        right: true,
        rank: 4,
        descending: true,
        text: |tenant, _, _| rate(tenant.service_per_second),
        order: |a, b, _| a.service_per_second.total_cmp(&b.service_per_second),
        tone: plain,
    },
    Column {
        title: "SHARE",
        width: 6,
        grows_to: 6,
        right: true,
        rank: 1,
        descending: true,
        text: |tenant, _, _| percent(tenant.share),
        order: |a, b, _| a.share.total_cmp(&b.share),
        tone: plain,
    },
    Column {
        title: "FAIR",
        width: 5,
        grows_to: 5,
        right: true,
        rank: 1,
        descending: true,
        text: |tenant, _, _| percent(tenant.fair_share),
        order: |a, b, _| a.fair_share.total_cmp(&b.fair_share),
        tone: |_| Tone::Dim,
    },
    Column {
        title: "SHARE|FAIR",
        width: 10,
        grows_to: 20,
        right: false,
        rank: 5,
        descending: true,
        text: share_bar,
        order: |a, b, _| (a.share - a.fair_share).total_cmp(&(b.share - b.fair_share)),
        tone: plain,
    },
    Column {
        title: "QUEUED",
        width: 7,
        grows_to: 7,
        right: true,
        rank: 2,
        descending: true,
        text: |tenant, _, _| count(tenant.queued_requests.into()),
        order: |a, b, _| a.queued_requests.cmp(&b.queued_requests),
        tone: |tenant| if tenant.queued_requests > 0 { Tone::Wait } else { Tone::Plain },
    },
    Column {
        title: "FLIGHT",
        width: 7,
        grows_to: 7,
        right: true,
        rank: 3,
        descending: true,
        text: |tenant, _, _| count(tenant.in_flight_requests.into()),
        order: |a, b, _| a.in_flight_requests.cmp(&b.in_flight_requests),
        tone: plain,
    },
    Column {
        title: "BLOCKS",
        width: 7,
        grows_to: 7,
        right: true,
        rank: 6,
        descending: true,
        text: |tenant, _, _| count(tenant.kv_blocks.into()),
        order: |a, b, _| a.kv_blocks.cmp(&b.kv_blocks),
        tone: plain,
    },
    Column {
        title: "WEIGHT",
        width: 7,
        grows_to: 7,
        right: true,
        rank: 7,
        descending: true,
        text: |tenant, _, _| rate(tenant.weight),
        order: |a, b, _| a.weight.total_cmp(&b.weight),
        tone: |_| Tone::Dim,
    },
];

fn request_tone(request: &Request) -> Tone {
    match request.view.state() {
        RequestState::Decode => Tone::Decode,
        RequestState::Prefill => Tone::Prefill,
        RequestState::Queued | RequestState::Waiting | RequestState::Preempted | RequestState::Swapped => {
            Tone::Wait
        }
        RequestState::Retry | RequestState::Quarantined | RequestState::Paused => Tone::Bad,
        RequestState::Ended | RequestState::Unspecified => Tone::Dim,
    }
}

/// Tokens of a request: of its prompt, and generated ones; while the prompt is being computed, how far.
fn tokens_text(request: &Request, _: &ClusterState, _: usize) -> String {
    let view = &request.view;
    let prompt = count(view.prompt_tokens.into());
    if view.state() == RequestState::Prefill && view.output_tokens == 0 && view.computed_tokens > 0 {
        return format!("{}/{prompt}", count(view.computed_tokens.into()));
    }
    format!("{prompt}+{}", count(view.output_tokens.into()))
}

/// Why a request waits, or how it ended.
fn why(request: &Request) -> &str {
    if request.ended() { &request.view.outcome } else { &request.view.waiting_reason }
}

/// Index of the age among the columns of requests: the order at the start.
pub const AGE: usize = 3;

/// Columns of the table of requests.
pub static REQUESTS: [Column<Request>; 9] = [
    Column {
        title: "REQUEST",
        width: 10,
        grows_to: 40,
        right: false,
        rank: 0,
        descending: false,
        text: |request, _, _| request.view.request_id.clone(),
        order: |a, b, _| a.view.request_id.cmp(&b.view.request_id),
        tone: plain,
    },
    Column {
        title: "STATE",
        width: 9,
        grows_to: 11,
        right: false,
        rank: 1,
        descending: false,
        text: |request, _, _| state_name(request.view.state()).to_owned(),
        order: |a, b, _| a.view.state.cmp(&b.view.state),
        tone: request_tone,
    },
    Column {
        title: "TENANT",
        width: 8,
        grows_to: 16,
        right: false,
        rank: 4,
        descending: false,
        text: |request, _, _| request.view.tenant.clone(),
        order: |a, b, _| a.view.tenant.cmp(&b.view.tenant),
        tone: plain,
    },
    Column {
        title: "AGE",
        width: 5,
        grows_to: 5,
        right: true,
        rank: 2,
        descending: true,
        text: |request, state, _| span(state.age(request)),
        order: |a, b, state| state.age(a).cmp(&state.age(b)),
        tone: plain,
    },
    Column {
        title: "TOKENS",
        width: 9,
        grows_to: 11,
        right: true,
        rank: 3,
        descending: true,
        text: tokens_text,
        order: |a, b, _| {
            let tokens = |request: &Request| {
                u64::from(request.view.prompt_tokens) + u64::from(request.view.output_tokens)
            };
            tokens(a).cmp(&tokens(b))
        },
        tone: plain,
    },
    Column {
        title: "BLK",
        width: 4,
        grows_to: 5,
        right: true,
        rank: 6,
        descending: true,
        text: |request, _, _| count(request.view.kv_blocks.into()),
        order: |a, b, _| a.view.kv_blocks.cmp(&b.view.kv_blocks),
        tone: plain,
    },
    Column {
        title: "WORKER",
        width: 9,
        grows_to: 16,
        right: false,
        rank: 5,
        descending: false,
        text: |request, _, _| request.view.worker.clone(),
        order: |a, b, _| a.view.worker.cmp(&b.view.worker),
        tone: plain,
    },
    Column {
        title: "TRY",
        width: 4,
        grows_to: 4,
        right: true,
        rank: 7,
        descending: true,
        text: |request, _, _| count(request.view.attempts.into()),
        order: |a, b, _| a.view.attempts.cmp(&b.view.attempts),
        tone: |request| if request.view.attempts > 1 { Tone::Bad } else { Tone::Plain },
    },
    Column {
        title: "WHY",
        width: 14,
        grows_to: 40,
        right: false,
        rank: 8,
        descending: false,
        text: |request, _, _| why(request).to_owned(),
        order: |a, b, _| why(a).cmp(why(b)),
        tone: |_| Tone::Dim,
    },
];

#[cfg(test)]
mod tests {
    use super::super::worker_table::WORKERS;
    use super::*;

    #[test]
    fn the_most_important_columns_are_shown_and_fill_the_width() {
        let titles_at = |width| {
            arrange(&REQUESTS, width).iter().map(|(column, _)| column.title).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(titles_at(80), "REQUEST STATE TENANT AGE TOKENS BLK WORKER TRY WHY");
        assert_eq!(titles_at(40), "REQUEST STATE AGE TOKENS");
        for width in 0..=300 {
            let arranged = arrange(&WORKERS, width);
            let sum = arranged.iter().map(|(_, width)| width).sum::<usize>() + arranged.len() - 1;
            assert!(sum <= width.max(1), "{width}: {sum}");
        }
    }

    #[test]
    fn equal_rows_keep_their_order_in_both_directions() {
        let state = ClusterState::default();
        let tenant =
            |name: &str, share| TenantView { tenant: name.to_owned(), share, ..TenantView::default() };
        let tenants = [tenant("b", 0.5), tenant("a", 0.5), tenant("c", f64::NAN), tenant("d", 0.75)];
        let order = |sorting: Sorting| {
            let mut rows: Vec<&TenantView> = tenants.iter().collect();
            sorting.sort(&TENANTS, &mut rows, &state);
            rows.iter().map(|tenant| tenant.tenant.as_str()).collect::<String>()
        };
        assert_eq!(order(Sorting { column: 2, reversed: false }), "cdba");
        assert_eq!(order(Sorting { column: 2, reversed: true }), "badc");
        assert_eq!(order(Sorting { column: 0, reversed: false }), "abcd");
        let mut sorting = Sorting { column: 0, reversed: true };
        sorting.step(-1, TENANTS.len());
        assert_eq!(sorting, Sorting { column: 8, reversed: false });
    }
}

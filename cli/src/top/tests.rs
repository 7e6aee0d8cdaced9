//! Drawings and keys of `inflight top`, on an emulated terminal.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use inflight_proto::v1::{
    ClusterDiagnosis, ClusterFinding, ClusterView, GetRequestResponse, IterationView, LifeEvent, Load,
    Percentiles, RequestState, RequestView, TenantView, WatchResponse, WorkerFacts, WorkerLimits, WorkerView,
};
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::draw::draw;
use super::model::{Action, Model, Pane};
use super::plain;

fn request(number: u64, state: RequestState, tenant: &str, worker: &str) -> RequestView {
    RequestView {
        number,
        request_id: format!("req-{number}"),
        tenant: tenant.to_owned(),
        model: "demo".to_owned(),
        state: state.into(),
        age_ms: 10_000 - 1_000 * number,
        prompt_tokens: 128,
        max_tokens: 64,
        choices: 1,
        worker: worker.to_owned(),
        attempts: u32::from(!worker.is_empty()),
        ..RequestView::default()
    }
}

fn worker(name: &str, state: &str, used: u32, step_us: u32) -> WorkerView {
    WorkerView {
        name: name.to_owned(),
        model: "demo".to_owned(),
        state: state.to_owned(),
        limits: Some(WorkerLimits { kv_blocks: 100, ..WorkerLimits::default() }),
        load: Some(Load {
            running_sequences: used / 10,
            waiting_sequences: 2,
            kv_blocks_used: used,
            preemptions: 12_345,
            ..Load::default()
        }),
        kv_blocks_cached: 20,
        step_target_us: 20_000,
        requests: 3,
        iterations: vec![IterationView { duration_us: step_us, ..IterationView::default() }],
        facts: Some(WorkerFacts {
            version: "0.2.0".to_owned(),
            device: "NVIDIA H200".to_owned(),
            tensor_parallel: 2,
            memory_bytes: 282 << 30,
            weight_bytes: 15 << 30,
            kv_cache_bytes: 120 << 30,
            weight_encoding: "bf16".to_owned(),
            kv_encoding: "fp8".to_owned(),
        }),
        ..WorkerView::default()
    }
}

fn tenant(name: &str, share: f64, fair_share: f64) -> TenantView {
    TenantView {
        tenant: name.to_owned(),
        weight: 1.0,
        service_per_second: 1000.0 * share,
        share,
        fair_share,
        queued_requests: 4,
        in_flight_requests: 2,
        kv_blocks: 30,
    }
}

/// A small cluster.
fn update() -> WatchResponse {
    let cluster = ClusterView {
        router: "router-0".to_owned(),
        version: "0.1.0".to_owned(),
        routers: 1,
        open_requests: 4,
        queued_requests: 1,
        in_flight_requests: 3,
        output_tokens_per_second: 1234.5,
        prompt_tokens_per_second: 56.78,
        ended_per_second: 0.4,
        first_token_ms: Some(Percentiles { p50: 120.0, p90: 340.0, p99: 12_900.0 }),
        gap_ms: Some(Percentiles { p50: 4.2, p90: 8.0, p99: 15.0 }),
        queue_ms: Some(Percentiles { p50: 0.0, p90: 2.0, p99: 30.0 }),
        viewers: 1,
        models: vec!["demo".to_owned()],
        ..ClusterView::default()
    };
    let decode = RequestView {
        output_tokens: 7,
        kv_blocks: 9,
        cached_tokens: 96,
        ..request(1, RequestState::Decode, "acme", "worker-0")
    };
    let prefill = RequestView {
        computed_tokens: 64,
        kv_blocks: 8,
        attempts: 2,
        ..request(2, RequestState::Prefill, "acme", "worker-1")
    };
    let queued = RequestView {
        waiting_reason: "no worker has room".to_owned(),
        ..request(3, RequestState::Queued, "beta", "")
    };
    let ended =
        RequestView { outcome: "stop".to_owned(), ..request(4, RequestState::Ended, "beta", "worker-1") };
    WatchResponse {
        number: 1,
        unix_ms: 1_764_079_402_000,
        cluster: Some(cluster),
        workers: vec![worker("worker-0", "connected", 50, 12_340), worker("worker-1", "ejected", 0, 25_000)],
        tenants: vec![tenant("acme", 0.75, 0.5), tenant("beta", 0.25, 0.5)],
        requests: vec![decode, prefill, queued, ended],
        skipped_updates: 0,
        diagnosis: None,
    }
}

fn model() -> Model {
    let mut model = Model::new();
    model.update(update(), true);
    model
}

/// The screen as text, without spaces at the ends of lines.
fn screen(model: &Model, columns: u16, rows: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
    terminal.draw(|frame| draw(frame, model)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let mut text = String::new();
    for row in 0..rows {
        let mut line = String::new();
        let mut column = 0;
        while column < columns {
            let symbol = buffer[(column, row)].symbol();
            line.push_str(symbol);
            column += super::text::width(symbol).max(1) as u16;
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn press(model: &mut Model, code: KeyCode) -> Action {
    model.key(KeyEvent::new(code, KeyModifiers::NONE))
}

fn type_text(model: &mut Model, text: &str) {
    for character in text.chars() {
        press(model, KeyCode::Char(character));
    }
}

#[test]
fn the_overview_at_80_columns() {
    let expected = "\
inflight top  [1 overview]  2 workers  3 tenants  4 requests        14:03:22 UTC
router router-0 0.1.0  demo  2 workers  viewers 1
open 4  queued 1  flight 3  retry 0  out 1235 tok/s  in 56.8 tok/s  ended 0.4/s
p50/p90/p99 ms  first token 120/340/12.9k  gap 4.2/8.0/15  queue 0.0/2.0/30
WORKER▲       STATE      RUN  WAIT  SWAP KV                  STEP  PREEMPT  REQS
worker-0      connected    5     2     0 ███▒·  50%   12.3/20.0ms    12.3k     3
worker-1      ejected      0     2     0 ▒····   0%   25.0/20.0ms    12.3k     3
TENANT        SERVICE/s▼  SHARE  FAIR SHARE|FAIR  QUEUED  FLIGHT  BLOCKS  WEIGHT
acme                 750    75%   50% █████|██··       4       2      30     1.0
beta                 250    25%   50% ███··|····       4       2      30     1.0
REQUEST    STATE     TENANT    AGE▼    TOKENS  BLK WORKER     TRY WHY
req-1      decode    acme      9.0s     128+7    9 worker-0     1
req-2      prefill   acme      8.0s    64/128    8 worker-1     2
req-3      queued    beta      7.0s     128+0    0              0 no worker has…









3 of 4 requests  ?:help q:quit Tab:pane /:filter s:sort r:reverse Enter:follow …
";
    assert_eq!(screen(&model(), 80, 24), expected);
}

#[test]
fn the_overview_at_40_columns() {
    let expected = "\
inflight top  [1 overview]  14:03:22 UTC
router router-0 0.1.0  demo  2 workers
viewers 1
open 4  queued 1  flight 3  retry 0
out 1235 tok/s  in 56.8 tok/s
ended 0.4/s
p50/p90/p99 ms
first token 120/340/12.9k
gap 4.2/8.0/15  queue 0.0/2.0/30
WORKER▲  STATE      RUN  WAIT KV
worker-0 connected    5     2 ███▒·  50%
worker-1 ejected      0     2 ▒····   0%
TENANT       SHARE  FAIR  QUEUED  FLIGHT
acme           75%   50%       4       2
beta           25%   50%       4       2
REQUEST        STATE      AGE▼    TOKENS
req-1          decode     9.0s     128+7
req-2          prefill    8.0s    64/128
req-3          queued     7.0s     128+0




3 of 4 requests  ?:help q:quit Tab:pane…
";
    assert_eq!(screen(&model(), 40, 24), expected);
}

#[test]
fn a_snapshot_is_the_same_as_plain_text() {
    let expected = "\
router router-0 0.1.0  demo  2 workers  viewers 1
open 4  queued 1  flight 3  retry 0  out 1235 tok/s  in 56.8 tok/s  ended 0.4/s
p50/p90/p99 ms  first token 120/340/12.9k  gap 4.2/8.0/15  queue 0.0/2.0/30

WORKER▲   STATE      RUN  WAIT  SWAP KV                  STEP  PREEMPT  REQS MODEL      DEVICE
worker-0  connected    5     2     0 ███▒·  50%   12.3/20.0ms    12.3k     3 demo       2x NVIDIA H…
worker-1  ejected      0     2     0 ▒····   0%   25.0/20.0ms    12.3k     3 demo       2x NVIDIA H…

TENANT                   SERVICE/s▼  SHARE  FAIR SHARE|FAIR           QUEUED  FLIGHT  BLOCKS  WEIGHT
acme                            750    75%   50% ██████████|███·····       4       2      30     1.0
beta                            250    25%   50% █████·····|········       4       2      30     1.0

REQUEST                        STATE     TENANT    AGE▼    TOKENS  BLK WORKER     TRY WHY
req-1                          decode    acme      9.0s     128+7    9 worker-0     1
req-2                          prefill   acme      8.0s    64/128    8 worker-1     2
req-3                          queued    beta      7.0s     128+0    0              0 no worker has…
… 1 more requests are open
";
    assert_eq!(plain::snapshot(&model(), 100), expected);
}

#[test]
fn a_followed_request_shows_its_life() {
    let mut model = model();
    press(&mut model, KeyCode::Down);
    assert_eq!(press(&mut model, KeyCode::Enter), Action::Read(2));
    assert!(screen(&model, 80, 24).contains("reading its life"), "{}", screen(&model, 80, 24));
    let event = |at_ms, kind: &str, worker: &str, detail: &str| LifeEvent {
        at_ms,
        kind: kind.to_owned(),
        worker: worker.to_owned(),
        detail: detail.to_owned(),
        ..LifeEvent::default()
    };
    let events = vec![
        event(0, "arrived", "", ""),
        event(
            1,
            "dispatched",
            "worker-1",
            "prefix cache: 96 of 128 tokens; least predicted time to first token",
        ),
        event(12_345, "lost", "worker-1", "\u{1b}[2Jthe session closed"),
    ];
    let request = Some(RequestView { output_tokens: 5, ..request(2, RequestState::Retry, "acme", "") });
    model.life(1, Err("of another request".to_owned()));
    model.life(
        2,
        Ok(GetRequestResponse { request, events, omitted_events: 3, ..GetRequestResponse::default() }),
    );
    let expected = "\
inflight top  [1 overview]  2 workers  3 tenants  4 requests        14:03:22 UTC
request req-2 · number 2
retry · 8.0s · tenant acme · model demo
prompt 128 tokens, 0 cached · output 5 of at most 64 · choices 1 · KV blocks 0 ·
attempts 0 · priority 0
3 events between the first and the last ones are left out
  0.000 ms arrived
  1.000 ms dispatched    worker-1: prefix cache: 96 of 128 tokens; least
                         predicted time to first token
  12.345 s lost          worker-1: �[2Jthe session closed



?:help q:quit Tab:pane /:filter s:sort r:reverse Enter:follow p:pause e:ended
";
    assert_eq!(screen(&model, 80, 14), expected);
    let narrow = "\
inflight top  [1 overview]  14:03:22 UTC
request req-2 · number 2
retry · 8.0s · tenant acme · model demo
prompt 128 tokens, 0 cached · output 5
of at most 64 · choices 1 · KV blocks 0
· attempts 0 · priority 0
3 events between the first and the last
ones are left out
  0.000 ms arrived
  1.000 ms dispatched
  worker-1: prefix cache: 96 of 128
  tokens; least predicted time to first
  token
  12.345 s lost
  worker-1: �[2Jthe session closed




?:help q:quit Tab:pane /:filter s:sort …
";
    assert_eq!(screen(&model, 40, 20), narrow);
    // It is shown even when the router does not answer, and the roster comes back.
    model.life(2, Err("UNAVAILABLE: gone".to_owned()));
    let text = screen(&model, 80, 24);
    assert!(text.contains("UNAVAILABLE: gone") && text.contains("dispatched"), "{text}");
    press(&mut model, KeyCode::Esc);
    assert!(screen(&model, 80, 24).contains("REQUEST"));
}

#[test]
fn findings_facts_of_workers_and_traces_are_shown() {
    let mut model = model();
    type_text(&mut model, "5");
    assert!(screen(&model, 80, 12).contains("no diagnosis yet"));
    let mut later = WatchResponse { diagnosis: Some(ClusterDiagnosis::default()), ..update() };
    model.update(later.clone(), false);
    assert!(screen(&model, 80, 12).contains("nothing stands out in the last minute"));
    assert!(!plain::snapshot(&model, 80).contains("finding"));
    let finding = ClusterFinding {
        worker: "worker-0".to_owned(),
        other_workers: 2,
        bottleneck: "queue_time".to_owned(),
        window_share: 0.42,
        evidence: "the longest wait was 3.0 s".to_owned(),
        advice: "add workers".to_owned(),
    };
    let retries = ClusterFinding { bottleneck: "retries".to_owned(), ..ClusterFinding::default() };
    let findings = vec![finding, retries];
    later.diagnosis = Some(ClusterDiagnosis { findings, undiagnosed_workers: 1, omitted_findings: 0 });
    model.update(later, false);
    // An update without a diagnosis leaves it.
    model.update(update(), false);
    let text = screen(&model, 80, 20);
    for part in [
        "finding: queue time, 42%, worker-0 and 2 more; 1 more (5: details)",
        "\nqueue time, 42%, worker-0 and 2 more\n  the longest wait was 3.0 s\n  → add workers\nretries, 0%, router\n",
        "workers without a diagnosis: 1",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert!(plain::snapshot(&model, 80).contains("\n  → add workers\n"));
    type_text(&mut model, "2");
    let text = screen(&model, 200, 12);
    for part in ["2x NVIDIA H200, bf16", "15G+120G/282G", "0.2.0"] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    type_text(&mut model, "4");
    press(&mut model, KeyCode::Enter);
    let (trace_id, trace_url) = ("4bf92f3577b34da6".to_owned(), "https://t.example/4bf9".to_owned());
    model.life(1, Ok(GetRequestResponse { trace_id, trace_url, ..GetRequestResponse::default() }));
    let text = screen(&model, 80, 24);
    assert!(text.contains("trace 4bf92f3577b34da6\ntrace https://t.example/4bf9"), "{text}");
    // Another watch begins, perhaps of an older router.
    model.update(update(), true);
    assert_eq!(model.state().diagnosis, None);
}

/// Ids of the listed requests, in their order.
fn listed(model: &Model) -> String {
    model.requests().iter().map(|request| request.view.number.to_string()).collect::<Vec<_>>().join(" ")
}

#[test]
fn keys_sort_filter_select_and_show_ended_requests() {
    let mut model = model();
    assert_eq!(listed(&model), "1 2 3", "the oldest first");
    press(&mut model, KeyCode::Char('r'));
    assert_eq!(listed(&model), "3 2 1");
    press(&mut model, KeyCode::Char('s'));
    press(&mut model, KeyCode::Char('s'));
    assert_eq!(listed(&model), "1 2 3", "by blocks");
    press(&mut model, KeyCode::Char('S'));
    assert_eq!(listed(&model), "1 2 3", "by tokens, the most first");
    press(&mut model, KeyCode::Char('e'));
    assert_eq!(listed(&model), "1 2 3 4");
    press(&mut model, KeyCode::Char('/'));
    // While the filter is edited, no key means anything else.
    type_text(&mut model, "ACME q");
    press(&mut model, KeyCode::Backspace);
    assert!(screen(&model, 80, 24).contains("filter: ACME ▏"), "{}", screen(&model, 80, 24));
    type_text(&mut model, "fill");
    press(&mut model, KeyCode::Enter);
    assert_eq!(listed(&model), "2", "of acme, in prefill");
    assert!(screen(&model, 80, 24).contains("1 of 4 requests with \"ACME fill\""));
    press(&mut model, KeyCode::Esc);
    assert_eq!(listed(&model), "1 2 3 4");
    // The selection follows its request; if that is gone, the row stays.
    press(&mut model, KeyCode::Down);
    let selected = |model: &Model| {
        let rows = model.requests();
        model.selection(&rows).map(|at| rows[at].view.number)
    };
    assert_eq!(selected(&model), Some(2));
    press(&mut model, KeyCode::End);
    assert_eq!(selected(&model), Some(4));
    press(&mut model, KeyCode::Char('e'));
    assert_eq!(selected(&model), Some(3));
    press(&mut model, KeyCode::Home);
    assert_eq!(selected(&model), Some(1));
    for pane in [Pane::Workers, Pane::Tenants, Pane::Requests, Pane::Findings, Pane::Overview] {
        press(&mut model, KeyCode::Tab);
        assert_eq!(model.pane, pane);
    }
    assert_eq!(model.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Action::Quit);
    assert_eq!(press(&mut model, KeyCode::Char('q')), Action::Quit);
}

#[test]
fn a_paused_display_stands_still_and_a_lost_router_is_announced() {
    let mut model = model();
    press(&mut model, KeyCode::Char('p'));
    let later = WatchResponse { unix_ms: 1_764_079_500_000, ..WatchResponse::default() };
    model.update(later, false);
    let text = screen(&model, 80, 24);
    assert!(text.contains("PAUSED") && text.contains("worker-1"), "{text}");
    press(&mut model, KeyCode::Char('p'));
    let text = screen(&model, 80, 24);
    assert!(text.contains("14:05:00 UTC") && !text.contains("ejected"), "{text}");
    model.wait(std::time::Duration::from_secs(7));
    assert!(screen(&model, 80, 24).contains("no update for 7.0s"));
    model.lost("no connection to http://r:1: refused\r\n");
    let text = screen(&model, 80, 24);
    assert!(text.contains("DISCONNECTED") && text.contains("r:1: refused��; connecting again"), "{text}");
    assert!(text.contains("req-1"), "the last state stays: {text}");
}

/// An update whose names try to take over the terminal, with values at their limits.
fn hostile() -> WatchResponse {
    let names = [
        "\u{1b}]0;owned\u{7}\u{1b}[31m\u{1b}[2J",
        "\u{202e}\u{2066}right to left\u{200f}",
        "a\r\nb\tc\u{8}\u{8}\u{9b}31m",
        "e\u{301}\u{301}\u{301}\u{301}\u{301}",
        "👩‍👩‍👧‍👦🇩🇪東京",
        "\u{0}\u{ad}\u{feff}\u{e0041}",
    ];
    let name = |at: usize| names[at % names.len()].to_owned();
    let requests = (0..200u64).map(|number| RequestView {
        number,
        request_id: name(number as usize) + &"x".repeat(number as usize),
        tenant: name(number as usize + 1),
        model: name(number as usize + 2),
        worker: name(number as usize + 3),
        waiting_reason: name(number as usize + 4),
        outcome: name(number as usize + 5),
        state: (number % 13) as i32,
        age_ms: u64::MAX,
        prompt_tokens: u32::MAX,
        computed_tokens: u32::MAX,
        output_tokens: u32::MAX,
        kv_blocks: u32::MAX,
        attempts: u32::MAX,
        ..RequestView::default()
    });
    let workers = (0..40).map(|at| WorkerView {
        name: name(at),
        state: name(at + 1),
        model: name(at + 2),
        load: Some(Load { kv_blocks_used: u32::MAX, preemptions: u64::MAX, ..Load::default() }),
        limits: Some(WorkerLimits { kv_blocks: at as u32 % 2, ..WorkerLimits::default() }),
        kv_blocks_cached: u32::MAX,
        step_target_us: u64::MAX * (at as u64 % 2),
        iterations: vec![IterationView { duration_us: u32::MAX, ..IterationView::default() }; 3],
        facts: Some(WorkerFacts {
            version: name(at),
            device: name(at + 1),
            weight_encoding: name(at + 2),
            weight_bytes: u64::MAX,
            kv_cache_bytes: u64::MAX,
            memory_bytes: u64::MAX * (at as u64 % 2),
            tensor_parallel: u32::MAX,
            ..WorkerFacts::default()
        }),
        ..WorkerView::default()
    });
    let extreme = [f64::NAN, f64::INFINITY, -1.0, 1e300];
    let tenants = (0..40).map(|at| TenantView {
        tenant: name(at),
        share: extreme[at % 4],
        fair_share: extreme[(at + 1) % 4],
        weight: extreme[(at + 2) % 4],
        service_per_second: extreme[(at + 3) % 4],
        ..TenantView::default()
    });
    let percentiles = Some(Percentiles { p50: f64::NAN, p90: 1e300, p99: -5.0 });
    let findings = (0..200).map(|at| ClusterFinding {
        worker: name(at),
        other_workers: at as u32 * (u32::MAX / 200),
        bottleneck: name(at + 1),
        window_share: extreme[at % 4],
        evidence: name(at + 2).repeat(50),
        advice: name(at + 3),
    });
    let findings = findings.collect();
    let diagnosis = ClusterDiagnosis { findings, undiagnosed_workers: u32::MAX, omitted_findings: u32::MAX };
    WatchResponse {
        unix_ms: u64::MAX,
        cluster: Some(ClusterView {
            router: name(0),
            version: name(1),
            models: names.map(str::to_owned).to_vec(),
            open_requests: u32::MAX,
            output_tokens_per_second: f64::INFINITY,
            first_token_ms: percentiles,
            gap_ms: percentiles,
            ..ClusterView::default()
        }),
        requests: requests.collect(),
        workers: workers.collect(),
        tenants: tenants.collect(),
        diagnosis: Some(diagnosis),
        ..WatchResponse::default()
    }
}

#[test]
fn hostile_names_and_any_size_of_the_terminal_do_no_harm() {
    let event = |at: u64| LifeEvent {
        at_ms: at * (u64::MAX / 300),
        kind: "\u{1b}[2J".to_owned(),
        worker: "\u{202e}w".to_owned(),
        detail: "東京 ".repeat(100),
        iteration: at,
        at_us: at,
    };
    let life = GetRequestResponse {
        request: hostile().requests.into_iter().next(),
        events: (0..256).map(event).collect(),
        omitted_events: u32::MAX,
        age_us: u64::MAX,
        trace_id: "\u{1b}[2J".to_owned(),
        trace_url: "\u{202e}http".to_owned(),
    };
    let setups: [fn(&mut Model); 9] = [
        |_| {},
        |model| type_text(model, "2"),
        |model| type_text(model, "3"),
        |model| type_text(model, "4"),
        |model| type_text(model, "5"),
        |model| type_text(model, "?"),
        |model| {
            type_text(model, "/");
            model.paste("\u{1b}[31m\u{202e}東京");
        },
        |model| {
            press(model, KeyCode::Enter);
        },
        |model| model.lost("\u{1b}[2J\u{202e}"),
    ];
    for (at, setup) in setups.into_iter().enumerate() {
        for first in [true, false] {
            let mut model = Model::new();
            if first {
                model.update(hostile(), true);
            }
            setup(&mut model);
            model.life(0, Ok(life.clone()));
            // Each setup has another part of the widths.
            let every = if inflight_fixtures::is_thorough() { 6 } else { 12 };
            let widths = (0..48).filter(|columns| (*columns + at as u16).is_multiple_of(every));
            for (columns, rows) in widths.flat_map(|columns| (0..16).map(move |rows| (columns, rows))) {
                screen(&model, columns, rows);
                if rows == 7 {
                    press(&mut model, [KeyCode::PageDown, KeyCode::Up][usize::from(columns % 2)]);
                }
            }
            let text = screen(&model, 120, 40) + &plain::snapshot(&model, 120);
            let obeyed =
                |c: char| (c.is_control() && c != '\n') || "\u{202e}\u{2066}\u{200d}\u{200f}".contains(c);
            assert!(!text.contains(obeyed), "setup {at}: {text:?}");
        }
    }
}

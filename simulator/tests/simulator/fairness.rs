//! Fairness compared with published measurements of VTC on a real server: the metric on the published
//! results, the simulated server under FCFS, then the default policy.

use inflight_contract::{TokenCost, Weight};
use inflight_simulator::workload::Workload;
use inflight_simulator::{Request, ServiceDifference, requests_of};
use inflight_traces::{ServedRequest, read_vtc};
use inflight_worker_core::Time;
use inflight_worker_core::policy::PolicyKind;

use crate::common::{Run, a10g, simulate, trace, vtc_limits};

/// Published maximum and mean service difference under VTC.
const VTC_REAL: (f64, f64) = (368.40, 251.66);
const VTC_OVERLOAD: (f64, f64) = (192.88, 103.77);
/// Published maximum and mean service difference and tokens per second under FCFS.
const FCFS_REAL: (f64, f64, f64) = (759.97, 433.53, 777.0);

const SEED: u64 = 20_241_107;

fn vtc_requests(file: &str) -> Option<Vec<Request>> {
    trace(&format!("tenants/{file}")).map(|path| requests_of(&read_vtc(&path).unwrap()))
}

fn run(policy: PolicyKind, requests: &[Request], until: Option<Time>) -> Run {
    let run = simulate(vtc_limits(), policy, a10g(), requests, until);
    run.print(&format!("{policy} on {} requests", requests.len()));
    run
}

fn off_by(value: f64, reference: f64) -> f64 {
    (value / reference - 1.0).abs()
}

#[test]
fn the_metric_reproduces_the_published_values() {
    let cents = |value: f64| (value * 100.0).round() as i64;
    for (file, max, mean, variance) in [
        ("vtc_real_fcfs.csv", 75_997, 43_353, 3_211_200),
        ("vtc_real_lcf.csv", 75_049, 32_382, 2_908_890),
        ("vtc_real_vtc.csv", 36_840, 25_166, 654_916),
        ("vtc_real_vtc_oracle.csv", 32_946, 22_751, 447_576),
        ("vtc_overload_fcfs.csv", 44_737, 43_900, 3_062),
        ("vtc_overload_vtc.csv", 19_288, 10_377, 698_124),
        ("vtc_overload_vtc_oracle.csv", 587, 51, 171),
    ] {
        let Some(path) = trace(&format!("tenants/{file}")) else { continue };
        let ticks = ServiceDifference::paper_ticks();
        let found = ServiceDifference::measure(&read_vtc(&path).unwrap(), TokenCost::default(), &ticks);
        println!("{file:28} max {:.2}  mean {:.2}  variance {:.2}", found.max, found.mean, found.variance);
        assert_eq!(
            (cents(found.max), cents(found.mean), cents(found.variance)),
            (max, mean, variance),
            "{file}"
        );
    }
}

#[test]
fn the_metric_agrees_with_a_manual_calculation() {
    // Two tenants with a demand of 600 cost units each in one window; the first is served fully, the second
    // by half.
    let request = |tenant, end_s| ServedRequest {
        tenant,
        arrival_s: 5.0,
        first_token_s: 10.0,
        end_s,
        prompt_tokens: 200,
        output_tokens: 200,
    };
    let found = ServiceDifference::measure(
        &[request(0, 50.0), request(1, 110.0)],
        TokenCost::default(),
        &[0.0, 200.0],
    );
    // 600 / 60 s against 300 / 60 s with the same demand; at the second tick nothing is served.
    assert!((found.max - 5.0).abs() < 1e-9 && (found.mean - 2.5).abs() < 1e-9, "{found:?}");
    assert!((found.variance - 6.25).abs() < 1e-9);
}

#[test]
fn simulated_fcfs_matches_the_real_server_in_fairness_and_throughput() {
    let Some(requests) = vtc_requests("vtc_real_fcfs.csv") else {
        // A workload with the same statistics gives similar results, up to randomness.
        let run = run(PolicyKind::Fcfs, &Workload::chat().generate(SEED), None);
        let (found, rate) = (run.service_difference(), run.records.tokens_per_second());
        assert!(off_by(found.max, FCFS_REAL.0) < 0.5 && off_by(found.mean, FCFS_REAL.1) < 0.5, "{found:?}");
        assert!(off_by(rate, FCFS_REAL.2) < 0.2, "{rate} tok/s");
        return;
    };
    let run = run(PolicyKind::Fcfs, &requests, None);
    let (found, rate) = (run.service_difference(), run.records.tokens_per_second());
    assert!(off_by(found.max, FCFS_REAL.0) < 0.1, "max {}", found.max);
    assert!(off_by(found.mean, FCFS_REAL.1) < 0.1, "mean {}", found.mean);
    assert!(off_by(rate, FCFS_REAL.2) < 0.05, "{rate} tok/s");
}

#[test]
fn the_default_policy_is_at_least_as_fair_as_vtc_and_as_fast_as_fcfs() {
    let measured = vtc_requests("vtc_real_fcfs.csv");
    let requests = measured.clone().unwrap_or_else(|| Workload::chat().generate(SEED));
    let fcfs = run(PolicyKind::Fcfs, &requests, None);
    let fair = run(PolicyKind::Fair, &requests, None);
    let (found, base) = (fair.service_difference(), fcfs.service_difference());
    if measured.is_some() {
        assert!(found.max <= VTC_REAL.0 && found.mean <= VTC_REAL.1, "{found:?}");
    }
    assert!(found.max < 0.6 * base.max && found.mean < 0.6 * base.mean, "{found:?} against {base:?}");
    let (rate, base) = (fair.records.tokens_per_second(), fcfs.records.tokens_per_second());
    assert!(off_by(rate, base) < 0.02, "{rate} tok/s against {base}");
}

#[test]
fn two_overloaded_tenants_get_equal_service_by_default_but_not_under_fcfs() {
    // Equal lengths: the published server filled its pool with whole requests, and so does the simulated one.
    let measured = vtc_requests("vtc_overload_vtc.csv");
    let requests =
        measured.unwrap_or_else(|| Workload { requests: 1620, ..Workload::overload() }.generate(SEED));
    let fair = run(PolicyKind::Fair, &requests, None);
    let fcfs = run(PolicyKind::Fcfs, &requests, None);
    let found = fair.service_difference();
    assert!(found.max <= VTC_OVERLOAD.0 && found.mean <= VTC_OVERLOAD.1, "{found:?}");
    assert!(fcfs.service_difference().mean > 4.0 * found.mean, "FCFS {:?}", fcfs.service_difference());
    assert!(off_by(fair.records.tokens_per_second(), fcfs.records.tokens_per_second()) < 0.02);
}

#[test]
fn the_gap_of_overloaded_tenants_is_bounded_by_default_but_not_under_fcfs() {
    let measured = vtc_requests("vtc_overload_fcfs.csv");
    let requests = measured.clone().unwrap_or_else(|| Workload::overload().generate(SEED));
    let gap_at = |policy, seconds: u64| {
        let run = run(policy, &requests, Some(Time::from_nanos(seconds * 1_000_000_000)));
        (run.gap.difference(0, 1).abs(), run.gap.largest(), run.gap.largest_share())
    };
    let ((early, ..), (late, ..)) = (gap_at(PolicyKind::Fcfs, 300), gap_at(PolicyKind::Fcfs, 540));
    println!("FCFS: {early:.0} after 300 s, {late:.0} after 540 s; published 130,349 and 235,513");
    assert!(late > 1.6 * early);
    if measured.is_some() {
        assert!(off_by(early, 130_349.0) < 0.1 && off_by(late, 235_513.0) < 0.1);
    }
    let (_, largest, share) = gap_at(PolicyKind::Fair, 540);
    println!("fair: never over {largest:.0}, {:.1} % of the bound; published 8,030", 100.0 * share);
    assert!(share <= 1.0);
    assert!(largest <= 2.0 * 8_030.0, "{largest}");
}

#[test]
fn overloaded_tenants_share_by_weight() {
    let mut requests = Workload { shares: vec![1.0, 1.0], ..Workload::overload() }.generate(SEED);
    for request in &mut requests {
        request.weight = Weight::try_from(if request.tenant == 0 { 1.0 } else { 3.0 }).unwrap();
    }
    let run = run(PolicyKind::Fair, &requests, Some(Time::from_nanos(500_000_000_000)));
    let served = |tenant| {
        let of = run.records.iter().filter(|record| record.request.tenant == tenant);
        of.map(|record| f64::from(record.output_tokens)).sum::<f64>()
    };
    println!("ratio of tokens, weight 3 to weight 1: {:.3}", served(1) / served(0));
    assert!(off_by(served(1), 3.0 * served(0)) < 0.05);
    assert!(run.gap.largest_share() <= 1.0, "{} of the bound", run.gap.largest_share());
}

#[test]
fn a_late_tenant_has_no_credit_however_little_a_third_one_uses() {
    // Tenant 0 has a small constant load: one or two of its requests run at any time. Tenant 1 overloads the
    // server from the start, tenant 2 from the middle.
    let at = |seconds: f64| Time::from_nanos((seconds * 1e9) as u64);
    let mut requests: Vec<Request> =
        (0..120).map(|i| Request::new(at(f64::from(i) * 2.5), 0, 8, 120)).collect();
    requests.extend((0..900).map(|i| Request::new(at(0.1 + f64::from(i) / 3.0), 1, 256, 256)));
    requests.extend((0..450).map(|i| Request::new(at(150.0 + f64::from(i) / 3.0), 2, 256, 256)));
    requests.sort_by_key(|request| request.arrival);
    let run = run(PolicyKind::Fair, &requests, Some(at(300.0)));
    println!("largest gap {:.0}, {:.2} of the bound", run.gap.largest(), run.gap.largest_share());
    let served = |tenant: u32| {
        let of = run.records.iter().filter(|r| r.request.tenant == tenant && r.ended > Some(at(160.0)));
        of.count() as f64
    };
    println!("requests ended after 160 s: {} of the early tenant, {} of the late one", served(1), served(2));
    assert!(off_by(served(2), served(1)) < 0.25, "the late tenant gets {} against {}", served(2), served(1));
    assert!(run.gap.largest_share() <= 1.0);
}

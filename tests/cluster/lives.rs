//! Lives of requests under load, as `GetRequest` explains them: in the order in which things happened, with numbers that add up and a
//! reason for each wait.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use futures::stream::{self, StreamExt as _};
use inflight_harness::{LocalCluster, eventually};
use inflight_proto::v1::admin_client::AdminClient;
use inflight_proto::v1::{
    GetRequestRequest, LifeEvent, ListRequestsRequest, RequestState, RequestView, WatchRequest,
};

use crate::program;
use crate::requests::{GenerationResult, sampled};

/// Requests of the load.
const REQUESTS: u32 = 200;
/// Open requests at a time.
const OPEN: usize = 48;

/// Returns the number behind a word in a detail.
fn number_after(detail: &str, word: &str) -> Result<u64> {
    let rest = detail.split_once(word).with_context(|| format!("no {word:?} in {detail:?}"))?.1;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().with_context(|| format!("no number behind {word:?} in {detail:?}"))
}

/// Kinds of events that may follow a kind.
fn followers(kind: &str) -> &'static [&'static str] {
    match kind {
        "" => &["arrived"],
        "arrived" => &["queued"],
        "queued" => &["dispatched"],
        "dispatched" => &["admitted"],
        "admitted" => &["chunk", "preempted", "swapped"],
        "chunk" => &["chunk", "first_token", "preempted", "swapped", "choice_ended"],
        "first_token" => &["preempted", "swapped", "choice_ended"],
        "preempted" | "swapped" => &["resumed"],
        // One that is swapped in needs no chunk; one may be preempted again before it has any.
        "resumed" => &["chunk", "first_token", "preempted", "swapped", "choice_ended"],
        "choice_ended" => &["ended"],
        _ => &[],
    }
}

/// Checks the life of a request. Returns how often it was preempted by recompute, and by swap.
fn check(request: &RequestView, events: &[LifeEvent]) -> Result<(u32, u32)> {
    ensure!(events.is_sorted_by_key(|event| event.at_ms), "times");
    ensure!(
        events.iter().filter(|event| event.iteration > 0).is_sorted_by_key(|event| event.iteration),
        "iterations"
    );
    let (mut before, mut preempted, mut swapped) = ("", 0, 0);
    // Tokens that have to be computed until the next output, and those that were.
    let (mut known, mut missing, mut computed) = (u64::from(request.prompt_tokens), 0, 0);
    for event in events {
        let LifeEvent { kind, detail, iteration, .. } = event;
        ensure!(followers(before).contains(&kind.as_str()), "{kind} follows {before:?}");
        match kind.as_str() {
            "admitted" | "resumed" => {
                (missing, computed) = (known - number_after(detail, "with ")?, 0);
                ensure!(detail.contains(&format!("before iteration {iteration},")), "{detail}");
            }
            "chunk" => {
                computed += detail.split(' ').next().unwrap_or_default().parse::<u64>()?;
                ensure!(detail.ends_with(&format!("in iteration {iteration}")), "{detail}");
            }
            "preempted" | "swapped" => {
                let by_swap = kind == "swapped";
                *(if by_swap { &mut swapped } else { &mut preempted }) += 1;
                let beneficiary =
                    ["for request ", "as no other one goes after it", "for a request that has ended"];
                ensure!(beneficiary.iter().any(|text| detail.contains(text)), "for whom: {detail}");
                ensure!(
                    (detail.contains(" KiB") || detail.contains(" MiB"))
                        && detail.contains("by recompute")
                        && detail.contains("by swap"),
                    "{detail}"
                );
                let blocks = number_after(detail, ": ")?;
                let tokens = number_after(detail, "blocks of ")?;
                ensure!(
                    tokens <= 16 * blocks && (blocks == 0 || tokens > 16 * (blocks - 1) || !by_swap),
                    "{detail}"
                );
                // A sequence that generates knows one token more than it has computed.
                known = known.max(tokens + 1);
            }
            // The last token of one that was swapped in is computed by a decode.
            "first_token" | "choice_ended" => ensure!(
                computed == missing || (computed, missing) == (0, 1),
                "{kind}: {computed} of {missing} tokens"
            ),
            _ => {}
        }
        before = kind.as_str();
    }
    ensure!(before == "ended", "{before}");
    Ok((preempted, swapped))
}

#[tokio::test(flavor = "multi_thread")]
async fn lives_of_requests_under_load_are_in_order_add_up_and_have_reasons() -> Result<()> {
    // A pool of a few requests, so that they are preempted in both ways.
    let flags = [
        "--workers=1",
        "--device=sim:flat,step=0.002,pool_tokens=1024,host_tokens=96",
        "--max-sequences=16",
        "--decode-reserve-tokens=0",
        "--no-prefix-cache",
    ];
    let cluster = LocalCluster::start(program(), &flags).await?;
    let client = cluster.client().await?;
    let mut operator = AdminClient::connect(cluster.endpoint.clone()).await?;
    let mut watch =
        operator.watch(WatchRequest { updates_per_second: 10, ..Default::default() }).await?.into_inner();
    watch.message().await?.context("a watch has no end")?;
    let watched = tokio::spawn(async move {
        let mut waiting: BTreeMap<String, u64> = BTreeMap::new();
        while let Ok(Some(update)) = watch.message().await {
            for request in update.requests {
                let waits = matches!(
                    request.state(),
                    RequestState::Queued
                        | RequestState::Waiting
                        | RequestState::Preempted
                        | RequestState::Swapped
                );
                if waits {
                    *waiting.entry(request.waiting_reason).or_default() += 1;
                }
            }
        }
        waiting
    });
    // Workers are observed some time after the first viewer has come.
    eventually("the worker is observed", || {
        let (mut client, mut operator) = (client.clone(), operator.clone());
        async move {
            let mut stream = client.generate(sampled("once", 2, 0)).await?.into_inner();
            GenerationResult::default().read_rest(&mut stream).await?;
            let listed = ListRequestsRequest { include_ended: true, ..Default::default() };
            let requests = operator.list_requests(listed).await?.into_inner().requests;
            let get = GetRequestRequest {
                number: requests.last().map_or(0, |last| last.number),
                ..Default::default()
            };
            let life = operator.get_request(get).await?.into_inner();
            ensure!(life.events.iter().any(|event| event.kind == "admitted"), "{:?}", life.events);
            Ok(())
        }
    })
    .await?;
    let answers = stream::iter(0..REQUESTS).map(|at| {
        let mut client = client.clone();
        async move {
            let prompt = "once upon a time there was a little ship on the sea ".repeat(1 + at as usize % 3);
            let mut request = sampled(&prompt, 24 + at * 7 % 100, at.into());
            request.request_id = format!("life-{at}");
            let mut stream = client.generate(request).await?.into_inner();
            GenerationResult::default().read_rest(&mut stream).await
        }
    });
    let answers: Vec<Result<GenerationResult>> = answers.buffer_unordered(OPEN).collect().await;
    for answer in answers {
        answer?;
    }
    let (mut preempted, mut swapped) = (0, 0);
    for at in 0..REQUESTS {
        let get = GetRequestRequest { request_id: format!("life-{at}"), ..Default::default() };
        // The last iterations are reported up to a tenth of a second after the end.
        let (by_recompute, by_swap) = eventually("its life is whole", || {
            let (mut operator, get) = (operator.clone(), get.clone());
            async move {
                let life = operator.get_request(get).await?.into_inner();
                let request = life.request.context("the request")?;
                ensure!(life.omitted_events == 0, "{} events are left out", life.omitted_events);
                check(&request, &life.events)
                    .with_context(|| format!("request {}: {:#?}", request.number, life.events))
            }
        })
        .await?;
        preempted += by_recompute;
        swapped += by_swap;
    }
    println!("{preempted} preemptions by recompute, {swapped} by swap");
    ensure!(
        preempted > 0 && swapped > 0,
        "{preempted} preemptions by recompute, {swapped} by swap: too little load"
    );
    drop(cluster);
    let waiting = watched.await?;
    println!("reasons: {waiting:?}");
    ensure!(!waiting.contains_key(""), "a wait without a reason: {waiting:?}");
    ensure!(waiting.contains_key("order") || waiting.contains_key("no worker has room"), "{waiting:?}");
    Ok(())
}

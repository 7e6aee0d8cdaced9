//! Agents on unmodified SDKs, whose model ends at any token: none executes a call that was not made.

use inflight_proto::v1;
use inflight_scripted::{Command, ScriptedSession};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Value, json};

use crate::foreign_clients::run;
use crate::http_client::{HttpCluster, with_http};
use crate::http_tools::{TEMPLATE, profile, tokenizer};
use inflight_router::HttpOptions;

/// Calls of an agent.
const TURNS: usize = 20;
/// End of sequence of the tokenizer.
const EOS: u32 = 282;

/// Turn of a model: tokens of text and a call, up to where they end.
struct Turn {
    tokens: Vec<u32>,
    reason: v1::FinishReason,
    /// Calls that are made: one, or none if the turn ends before it is whole.
    made: Value,
}

fn turn(number: usize, random: &mut StdRng) -> Turn {
    let call = json!({"name": "remove", "arguments": {"path": format!("/tmp/a b/{number}")}});
    let text = format!("I remove it.\n<tool_call>\n{call}\n</tool_call>");
    let mut tokens = tokenizer().encode_rendered(&text).unwrap();
    let cut = random.random_bool(0.6).then(|| random.random_range(1..tokens.len()));
    tokens.truncate(cut.unwrap_or(tokens.len()));
    let by_length = cut.is_some() && random.random_bool(0.5);
    let reason = if by_length { v1::FinishReason::Length } else { v1::FinishReason::Stop };
    // A call is whole with its arguments: only the brace and the marker behind them may be missing.
    let whole = call.to_string();
    let is_whole = tokenizer().decode_all(&tokens).unwrap().contains(&whole[..whole.len() - 1]);
    let made = if is_whole { json!([["remove", call["arguments"]]]) } else { json!([]) };
    Turn { tokens, reason, made }
}

/// Answers requests with turns, in their order.
async fn serve(session: &mut ScriptedSession, turns: &[Turn]) {
    let mut turns = turns.iter();
    loop {
        let Command::Submit(submit) = session.command().await else { continue };
        let Some(turn) = turns.next() else { continue };
        turn.tokens.chunks(4).for_each(|chunk| session.tokens(&submit, 0, chunk));
        let last: &[u32] = if turn.reason == v1::FinishReason::Stop { &[EOS] } else { &[] };
        session.finish(&submit, 0, last, turn.reason);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_execute_the_calls_that_were_made_and_no_others() {
    let seed: u64 = std::env::var("INFLIGHT_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    println!("INFLIGHT_SEED={seed}");
    let mut http = HttpCluster::over(profile(TEMPLATE), with_http(HttpOptions::default())).await;
    let url = format!("http://{}", http.address);
    let (mut made, mut cut) = (0, 0);
    for (nth, agent) in ["chat", "responses", "messages"].into_iter().enumerate() {
        for streamed in [false, true] {
            let mut random = StdRng::seed_from_u64(seed * 16 + 2 * nth as u64 + u64::from(streamed));
            let turns: Vec<Turn> = (0..TURNS).map(|number| turn(number, &mut random)).collect();
            let count = TURNS.to_string();
            let mut arguments = vec![url.as_str(), agent, &count];
            arguments.extend(streamed.then_some("--streamed"));
            let needed = "Python with tests/clients/python/requirements.txt";
            let client = run("INFLIGHT_TEST_PYTHON", needed, "agent_loop.py", "", &arguments);
            let executed = tokio::select! {
                executed = client => executed,
                () = serve(&mut http.session, &turns) => unreachable!("it serves for ever"),
            };
            let Some(executed) = executed else { return };
            let executed = executed.as_array().unwrap();
            assert_eq!(executed.len(), TURNS, "{agent}, streamed {streamed}");
            for (executed, turn) in executed.iter().zip(&turns) {
                let none = json!([]);
                // An agent may leave out a whole call if the turn ended by its length.
                let left_out = turn.reason == v1::FinishReason::Length && *executed == none;
                assert!(*executed == turn.made || left_out, "{agent}, {streamed}: {executed}, {}", turn.made);
                made += usize::from(*executed != none);
                cut += usize::from(turn.made == none);
            }
        }
    }
    println!("{made} calls were made and executed, {cut} were cut and not executed");
    assert!(made >= TURNS && cut >= TURNS, "{made} made, {cut} cut");
}

//! Model directories: every architecture serves, damaged checkpoints are rejected with a reason.

use anyhow::{Context, Result, ensure};
use inflight_fixtures::{Arch, Checkpoint, Corruption, Dtype};
use inflight_harness::{LocalCluster, run};
use inflight_proto::v1::{Chat, ChatMessage, TokenizeRequest, tokenize_request};

use crate::program;
use crate::requests::{generate, model, sampled};

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_of_every_architecture_serves() -> Result<()> {
    for arch in Arch::all() {
        let folder = Checkpoint::new(*arch, Dtype::Bf16).sharded(2).write_temp()?;
        let flag = format!("--model={}", folder.path().display());
        let cluster = LocalCluster::start(program(), &["--workers=1", "--model-name=tiny", &flag]).await?;
        let mut client = cluster.client().await?;
        let served = model(&mut client).await?;
        ensure!(served.name == "tiny" && served.workers == 1, "{served:?}");
        let answer =
            generate(&mut client, sampled("Hello", 12, 3)).await.with_context(|| format!("{arch:?}"))?;
        ensure!(answer.tokens.len() == 12, "{arch:?}: {answer:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tensor_parallel_model_is_batch_invariant_with_and_without_overlap() -> Result<()> {
    let flags = ["--workers=1", "--threads=2", "--tensor-parallel=2", "--verbose"];
    let mut answers = Vec::new();
    for overlap in [false, true] {
        let flags = flags.into_iter().chain(overlap.then_some("--overlap")).collect::<Vec<_>>();
        let cluster = LocalCluster::start(program(), &flags).await?;
        let mut client = cluster.client().await?;
        // Concurrent or alone, in this cluster or the next, a request gets the same tokens.
        let requests = (0..4).map(|i| {
            let mut client = client.clone();
            async move { generate(&mut client, sampled("Once upon a time", 24 + i, 7)).await }
        });
        for answer in futures::future::join_all(requests).await {
            answers.push(answer?);
        }
        answers.push(generate(&mut client, sampled("Once upon a time", 24, 7)).await?);
        ensure!(
            cluster.log().contains("ranks=2") || cluster.log().contains("\"ranks\":2"),
            "{}",
            cluster.log()
        );
    }
    for answer in &answers {
        ensure!(answer.tokens.len() >= 24 && answer.tokens[..24] == answers[0].tokens[..24], "{answer:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_chat_template_is_that_of_the_models_files_or_of_a_flag() -> Result<()> {
    let folder = Checkpoint::new(Arch::Llama31, Dtype::F32).write_temp()?;
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("chat_template.jinja"), "{{ pad_token }} of the model: {{ messages[0].content }}")?;
    std::fs::write(path("tokenizer_config.json"), "{}")?;
    std::fs::write(path("special_tokens_map.json"), r#"{"pad_token": {"content": "nothing"}}"#)?;
    std::fs::create_dir(path("additional_chat_templates"))?;
    std::fs::write(path("additional_chat_templates/tool_use.jinja"), "with tools")?;
    std::fs::write(path("own"), "of a flag: {{ messages[0].content }}")?;
    let model = format!("--model={}", folder.path().display());
    let flag = format!("--chat-template={}", path("own").display());
    for (flags, expected) in [(vec![], "nothing of the model: Hi"), (vec![flag.as_str()], "of a flag: Hi")] {
        let flags = [vec!["--workers=1", &model], flags].concat();
        let cluster = LocalCluster::start(program(), &flags).await?;
        let message =
            ChatMessage { role: "user".to_owned(), content: "Hi".to_owned(), ..ChatMessage::default() };
        let input =
            Some(tokenize_request::Input::Chat(Chat { messages: vec![message], ..Default::default() }));
        let request = TokenizeRequest { input, ..TokenizeRequest::default() };
        let tokenized = cluster.client().await?.tokenize(request).await?.into_inner();
        ensure!(tokenized.pieces.concat() == expected, "{tokenized:?}");
    }
    std::fs::write(path("own"), "{% if %}")?;
    for role in [&["worker", "--listen=127.0.0.1:0", "--metrics-listen=off"][..], &["up", "--port=0"]] {
        let refused = run(program(), &[role, &[&model, &flag]].concat(), "").await?;
        let clue = format!("--chat-template {}: the chat template does not parse", path("own").display());
        ensure!(refused.code == Some(2) && refused.stderr.contains(&clue), "{refused:?}");
    }
    Ok(())
}

#[tokio::test]
async fn every_damaged_checkpoint_is_rejected_with_a_clue() -> Result<()> {
    for corruption in Corruption::all() {
        let folder = Checkpoint::new(Arch::Llama31, Dtype::F32).write_temp()?;
        corruption.apply(folder.path())?;
        let flag = format!("--model={}", folder.path().display());
        let worker =
            ["worker", "--listen=127.0.0.1:0", "--metrics-listen=off", "--kv-cache-bytes=16MiB", &flag];
        let refused = run(program(), &worker, "").await?;
        ensure!(refused.code == Some(1) && refused.stdout.is_empty(), "{corruption:?}: {refused:?}");
        let message = refused.stderr.lines().last().unwrap_or_default();
        ensure!(message.starts_with("error: "), "{corruption:?}: {refused:?}");
        ensure!(
            refused.stderr.contains(corruption.clue()),
            "{corruption:?}: no {:?} in {message}",
            corruption.clue()
        );
        ensure!(!refused.stderr.contains("panic"), "{corruption:?}: {refused:?}");
    }
    Ok(())
}

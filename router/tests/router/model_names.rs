//! Further names of models.

use inflight_proto::v1;
use inflight_router::{HttpOptions, Options};
use inflight_scripted::{ScriptedWorker, WorkerProfile};
use serde_json::json;
use tonic::Code;

use crate::cluster::{Cluster, bounded, text, tokens};
use crate::http_client::{HttpCluster, with_http};

fn asked(model: &str) -> v1::GenerateRequest {
    v1::GenerateRequest { model: model.to_owned(), ..text("a") }
}

#[tokio::test]
async fn a_model_is_listed_and_answers_under_each_of_its_names() {
    bounded(async {
        let profile = WorkerProfile { model_aliases: &["org/tiny", "gpt-4o"], ..WorkerProfile::default() };
        let mut http = HttpCluster::over(profile, with_http(HttpOptions::default())).await;
        let list = http.get("/v1/models").await.json();
        let entry = |model: &serde_json::Value| json!([model["id"], model["root"]]);
        let listed: Vec<_> = list["data"].as_array().unwrap().iter().map(entry).collect();
        assert_eq!(listed, [json!(["tiny", "tiny"]), json!(["gpt-4o", "tiny"]), json!(["org/tiny", "tiny"])]);
        assert_eq!(http.get("/v1/models/org/tiny").await.json(), list["data"][2]);
        let models =
            http.cluster.client.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
        assert_eq!(
            (models.len(), &models[0].aliases[..]),
            (1, &["gpt-4o".to_owned(), "org/tiny".to_owned()][..])
        );
        for model in ["", "tiny", "gpt-4o", "org/tiny"] {
            let mut stream = http.cluster.generate(asked(model)).await.unwrap();
            let submit = http.session.submit().await;
            http.session.finish(&submit, 0, &tokens("world"), v1::FinishReason::Length);
            stream.read_to_end().await.unwrap();
            assert_eq!((stream.text[0].as_str(), stream.started.unwrap().model.as_str()), ("world", "tiny"));
        }
        let unknown = http.cluster.generate(asked("gpt-4")).await.err().unwrap();
        assert_eq!(unknown.code(), Code::NotFound);
    })
    .await;
}

#[tokio::test]
async fn a_first_name_goes_before_a_further_one_and_the_model_with_more_workers_before_others() {
    bounded(async {
        let profile =
            |model, model_aliases| WorkerProfile { model, model_aliases, ..WorkerProfile::default() };
        let mut workers = Vec::new();
        for profile in [profile("a", &["b", "x"]), profile("b", &["x"]), profile("b", &[])] {
            workers.push(ScriptedWorker::start(profile).await);
        }
        let mut cluster = Cluster::start(&workers.iter().collect::<Vec<_>>(), Options::default()).await;
        let mut sessions = Vec::new();
        for worker in &mut workers {
            let session = worker.session().await;
            session.grant(64, 1 << 16);
            sessions.push(session);
        }
        loop {
            let models =
                cluster.client.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
            if models.iter().map(|model| model.workers).sum::<u32>() == 3 {
                break;
            }
            tokio::task::yield_now().await;
        }
        for (asked_for, served) in [("a", "a"), ("b", "b"), ("x", "b")] {
            let serving = async {
                let [first, second, third] = &mut sessions[..] else { panic!() };
                let (session, submit) = tokio::select! {
                    submit = first.submit() => (first, submit),
                    submit = second.submit() => (second, submit),
                    submit = third.submit() => (third, submit),
                };
                session.finish(&submit, 0, &tokens("world"), v1::FinishReason::Length);
            };
            let calling = async {
                let mut stream = cluster.generate(asked(asked_for)).await.unwrap();
                stream.read_to_end().await.unwrap();
                stream.started.unwrap().model
            };
            let ((), model) = tokio::join!(serving, calling);
            assert_eq!(model, served, "{asked_for}");
        }
    })
    .await;
}

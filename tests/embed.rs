//! Both ways to embed the router.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use actix::Actor as _;
use actix_web::{App, HttpServer, web};
use kvc_router::actors::api::{Failure, TurnRequest, TurnResult};
use kvc_router::core::types::{BlockHash, Mode, SessionId};
use kvc_router::embed::{FinishTurn, RouteTurn, RouterActor};
use kvc_router::node::{Node, NodeConfig};
use kvc_router::settings::Layers;
use kvc_router::wire::info::KvRole;
use kvc_router::{Router, RouterHandle, Settings};

async fn router(nodes: &[Node]) -> RouterHandle {
    let urls = nodes.iter().map(Node::url).collect::<Vec<_>>().join(",");
    let flags = vec![("fleet.decode".to_owned(), urls)];
    let settings = Settings::load(&Layers { flags, ..Layers::default() }).unwrap().settings;
    let router = Router::start(&settings).await.unwrap();
    assert!(router.turns().all_up(Duration::from_secs(20)).await);
    router
}

async fn nodes() -> Vec<Node> {
    let node = |name: &'static str| Node::start(NodeConfig::new(name, [KvRole::Decode]));
    vec![node("a").await.unwrap(), node("b").await.unwrap()]
}

fn turn(turn: u32, blocks: u64) -> TurnRequest {
    TurnRequest {
        session: SessionId::new("t/s"),
        turn,
        chain: (1..=blocks).map(BlockHash).collect(),
        input_len: blocks * 24,
        append_len: blocks * 24,
        max_output: Some(10),
        one_shot: false,
        hint: None,
        explain: false,
    }
}

/// The gateway under a scope of another service's app.
#[actix_web::test]
async fn mounted_in_an_existing_app() {
    let nodes = nodes().await;
    let router = router(&nodes).await;
    let app = move || {
        let router = router.clone();
        App::new()
            .route("/", web::get().to(|| async { "own page" }))
            .service(web::scope("/llm").configure(|scope| router.configure(scope)))
    };
    let server = HttpServer::new(app).workers(1).tcp_nodelay(true).h1_allow_half_closed(false);
    let server = server.bind("127.0.0.1:0").unwrap();
    let addr = server.addrs()[0];
    actix_web::rt::spawn(server.run());
    let get = |path: &str| {
        let request = http::Request::get(format!("http://{addr}{path}"));
        async move {
            let client = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
                .build_http::<http_body_util::Empty<bytes::Bytes>>();
            let response = client.request(request.body(http_body_util::Empty::new()).unwrap()).await.unwrap();
            let body = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
            String::from_utf8(body.to_vec()).unwrap()
        }
    };
    assert_eq!(get("/").await, "own page");
    assert!(get("/llm/v1/models").await.contains("kvc-builtin"));
}

/// Placements only: route, re-place after a failure, finish, cancel.
#[actix_web::test]
async fn placements_through_the_actix_actor() {
    let nodes = nodes().await;
    let handle = router(&nodes).await;
    let actor = RouterActor(handle.clone()).start();
    let grant = actor.send(RouteTurn(turn(0, 50))).await.unwrap().unwrap();
    let first = grant.plan.decode.name.clone();
    let failed = FinishTurn::Failed(grant, Failure::DecodeUnreachable);
    let grant = actor.send(failed).await.unwrap().unwrap().unwrap();
    assert_ne!(grant.plan.decode.name, first);
    assert_eq!((grant.plan.mode, grant.plan.replaced), (Mode::Seed, 1));
    assert!(actor.send(FinishTurn::Served(grant, TurnResult::default())).await.unwrap().unwrap().is_none());
    let grant = actor.send(RouteTurn(turn(1, 60))).await.unwrap().unwrap();
    assert!(actor.send(FinishTurn::Cancelled(grant)).await.unwrap().unwrap().is_none());
    let refusal = actor.send(RouteTurn(turn(2, 9000))).await.unwrap().unwrap_err();
    assert_eq!(refusal.status, 413);
    // The first lease was returned when its turn was placed anew, the cancelled one when it was dropped; the
    // served turn never reached its node here, so its lease waits for its expiry.
    while nodes.iter().map(|n| n.engine().with(|s, _| s.ledger.leases())).sum::<usize>() > 1 {
        tokio::task::yield_now().await;
    }
    assert_eq!(handle.turns().inflight(), 0);
}

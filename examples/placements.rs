//! Placements only, through an actix actor: the service runs the transport itself.
//!
//! Run it: `cargo run --example placements`.

use std::time::Duration;

use actix::Actor as _;
use kvc_router::actors::api::{TurnRequest, TurnResult};
use kvc_router::core::types::{BlockHash, SessionId};
use kvc_router::embed::{FinishTurn, RouteTurn, RouterActor};
use kvc_router::node::{Node, NodeConfig};
use kvc_router::settings::Layers;
use kvc_router::wire::info::KvRole;
use kvc_router::{Router, Settings};

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let node = Node::start(NodeConfig::new("d0", [KvRole::Decode])).await?;
    let flags = vec![("fleet.decode".to_owned(), node.url())];
    let settings = Settings::load(&Layers { flags, ..Layers::default() })?.settings;
    let router = Router::start(&settings).await?;
    router.turns().all_up(Duration::from_secs(5)).await;
    let actor = RouterActor(router).start();

    let turn = TurnRequest {
        session: SessionId::new("demo/s1"),
        turn: 0,
        chain: (1..=100).map(BlockHash).collect(),
        input_len: 2400,
        append_len: 2400,
        max_output: Some(100),
        one_shot: false,
        hint: None,
        explain: false,
    };
    let grant = actor.send(RouteTurn(turn)).await?.map_err(|refusal| refusal.message)?;
    println!("{} on {} by {}", grant.plan.mode, grant.plan.decode.name, grant.plan.rung.as_str());
    // … the service talks to the worker here …
    let ended = actor.send(FinishTurn::Served(grant, TurnResult::default())).await?;
    ended.map_err(|refusal| refusal.message)?;
    Ok(())
}

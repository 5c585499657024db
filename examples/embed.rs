//! The gateway inside an existing actix-web service, beside the service's own routes.
//!
//! Run it: `cargo run --example embed`, then `curl http://127.0.0.1:8099/llm/v1/models`.

use actix_web::{App, HttpServer, web};
use kvc_router::node::{Node, NodeConfig};
use kvc_router::settings::Layers;
use kvc_router::wire::info::KvRole;
use kvc_router::{Router, Settings};

#[actix_web::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A worker to talk to; yours runs elsewhere.
    let node = Node::start(NodeConfig::new("d0", [KvRole::Decode])).await?;
    let flags = vec![("fleet.decode".to_owned(), node.url())];
    let settings = Settings::load(&Layers { flags, ..Layers::default() })?.settings;

    let router = Router::start(&settings).await?;
    let app = move || {
        let router = router.clone();
        App::new()
            .route("/", web::get().to(|| async { "the service's own page" }))
            .service(web::scope("/llm").configure(|scope| router.configure(scope)))
    };
    // Both are needed: streams must not wait for each other's pieces, and a client that leaves must be noticed.
    let server = HttpServer::new(app).tcp_nodelay(true).h1_allow_half_closed(false);
    println!("http://127.0.0.1:8099/llm/v1/models");
    server.bind("127.0.0.1:8099")?.run().await?;
    Ok(())
}

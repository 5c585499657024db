//! `kvc-router demo`: gateway, P and D workers and agents in one command. Real sessions run through the gateway's
//! HTTP front at accelerated time; then it goes on serving.

pub mod client;
mod fleet;
pub mod model;
mod report;
mod workload;

use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::node::reference_text;
use crate::prompt::Api;
use crate::settings::Settings;
use client::{Note, Played};
use fleet::Fleet;
pub use fleet::SERVES;
use report::Report;
use workload::Conversation;

/// How the demo runs.
#[derive(Debug, Clone, Copy)]
pub struct Mode {
    /// Worker nodes as child processes.
    pub processes: bool,
    /// End after the report.
    pub exit: bool,
    /// Print one JSON object instead of the table, and nothing else on standard output.
    pub json: bool,
}

/// Runs the demo on the current actix runtime.
///
/// # Errors
/// One line that says what is wrong.
pub async fn run(mut settings: Settings, mode: Mode) -> Result<(), String> {
    let sessions = workload::sample()?;
    let fleet = Fleet::start(&settings, mode.processes).await?;
    settings.fleet.decode = fleet.decode().to_vec();
    settings.fleet.prefill = fleet.prefill().to_vec();
    let router = crate::Router::start(&settings).await.map_err(|e| e.to_string())?;
    let serving = router.serve().map_err(|e| e.to_string())?;
    let gateway = serving.addrs.first().map(|addr| format!("http://{addr}")).unwrap_or_default();
    let handle = serving.server.handle();
    let server = actix_web::rt::spawn(serving.server);
    if !router.turns().all_up(Duration::from_secs(30)).await {
        return Err("the workers did not come up within 30 s".into());
    }
    eprintln!(
        "{} P + {} D workers of {} tokens of KV each, gateway on {gateway}",
        fleet.prefill().len(),
        fleet.decode().len(),
        settings.demo.k_d
    );
    let report = drive(&settings, &gateway, sessions).await.with_sync(router.turns().d2p());
    match mode.json {
        true => println!("{}", report.json()),
        false => print!("\n{}", report.table()),
    }
    if !mode.exit {
        eprintln!("\nStill serving; Ctrl-C ends it. Try (run it twice, then grow the conversation):");
        eprintln!("{}", curl(&gateway, &settings.node.model));
        crate::node::until_told_to_stop().await;
    }
    router.drain();
    handle.stop(false).await;
    let _ = server.await;
    router.stop().await;
    fleet.stop().await;
    Ok(())
}

fn curl(gateway: &str, model: &str) -> String {
    format!(
        "  curl -si {gateway}/v1/chat/completions -H 'x-session-id: me' -d '{{\"model\":\"{model}\",\"max_tokens\":32,\
         \"messages\":[{{\"role\":\"user\",\"content\":\"'\"$(seq -s ' ' 1200)\"'\"}}]}}'"
    )
}

/// Plays all sessions side by side, then checks every answer against a single cold worker's.
async fn drive(settings: &Settings, gateway: &str, sessions: Vec<workload::Session>) -> Report {
    let turns: usize = sessions.iter().map(|s| s.turns.len()).sum();
    let bar = bar(turns as u64, "turns");
    let started = Instant::now();
    let http = client::http();
    let (sender, notes) = unbounded_channel();
    let count = sessions.len();
    for (i, session) in sessions.into_iter().enumerate() {
        let (sender, bar) = (sender.clone(), bar.clone());
        let note = move |note: Note| {
            match &note {
                Note::Played(_) => bar.inc(1),
                Note::Failed(why) => bar.suspend(|| eprintln!("{why}")),
            }
            // The receiver lives until all senders are gone.
            let _ = sender.send((i, note));
        };
        let agent = client::play(
            http.clone(),
            gateway.to_owned(),
            settings.node.model.clone(),
            Conversation::new(session),
            settings.demo.time_scale,
            note,
        );
        tokio::spawn(agent);
    }
    drop(sender);
    let (played, errors) = collect(notes, count).await;
    let wall = started.elapsed();
    bar.finish_and_clear();
    let mismatched = mismatches(&settings.node.model, &played).await;
    Report::new(&played, errors, mismatched, wall)
}

async fn collect(mut notes: UnboundedReceiver<(usize, Note)>, sessions: usize) -> (Vec<Vec<Played>>, usize) {
    let (mut played, mut errors) = (vec![Vec::new(); sessions], 0);
    while let Some((session, note)) = notes.recv().await {
        match note {
            Note::Played(turn) => played[session].push(turn),
            Note::Failed(_) => errors += 1,
        }
    }
    (played, errors)
}

/// Answers that differ from those of a single cold worker.
async fn mismatches(model: &str, sessions: &[Vec<Played>]) -> usize {
    let turns: Vec<(bytes::Bytes, String)> =
        sessions.iter().flatten().map(|t| (t.body.clone(), t.text.clone())).collect();
    let bar = bar(turns.len() as u64, "answers checked");
    let model: Arc<str> = model.into();
    let check = move || {
        let differs = |(body, text): &(bytes::Bytes, String)| {
            bar.inc(1);
            let Ok(cold) = reference_text(&model, Api::Chat, body) else { return false };
            if cold != *text {
                // A prompt of nearly K_d leaves no room for a long answer: that one is short, not wrong.
                let short = cold.starts_with(text.as_str());
                tracing::warn!(
                    short,
                    got = text.len(),
                    cold = cold.len(),
                    "an answer differs from a cold worker's"
                );
            }
            cold != *text
        };
        let count = turns.iter().filter(|turn| differs(turn)).count();
        bar.finish_and_clear();
        count
    };
    tokio::task::spawn_blocking(check).await.unwrap_or(usize::MAX)
}

fn bar(len: u64, what: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}, {eta} left");
    let bar = ProgressBar::with_draw_target(Some(len), ProgressDrawTarget::stderr());
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())).with_message(what.to_owned())
}

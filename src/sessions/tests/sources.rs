use serde_json::{Value, json};

use super::*;
use crate::prompt::{Api, read};

const UUID: &str = "0f2e7a54-1111-4222-8333-abcdefabcdef";

type Case<'a> = (&'a [(&'a str, &'a str)], Value, &'a str);

/// `source=key strength`, or `-`.
fn found(headers: &[(&str, &str)], fields: Value) -> String {
    let mut body = json!({"model": "m", "messages": [], "input": []});
    body.as_object_mut().expect("object").extend(fields.as_object().expect("object").clone());
    let body = body.to_string();
    let prompt = read(Api::Chat, body.as_bytes(), &()).expect("good");
    let headers: Vec<(&str, &[u8])> = headers.iter().map(|(n, v)| (*n, v.as_bytes())).collect();
    let identity = Identity::of(Headers(&headers), &prompt.fields.ids);
    match (identity.source, identity.key) {
        (Some(source), Some(key)) => format!("{source}={key} {}", identity.strength.as_str()),
        _ => "-".into(),
    }
}

#[test]
fn every_client_of_the_table() {
    let none = json!({});
    let user_id = json!({"metadata": {"user_id": format!("{{\"session_id\":\"{UUID}\"}}")}});
    let cases: &[Case<'_>] = &[
        (&[("x-kvc-session-id", "k"), ("x-smg-routing-key", "s")], none.clone(), "x-kvc-session-id=k exact"),
        (&[("x-smg-routing-key", "s"), ("x-session-id", "t")], none.clone(), "x-smg-routing-key=s exact"),
        (&[("x-dynamo-session-id", "d")], none.clone(), "x-dynamo-session-id=d exact"),
        // Claude Code
        (&[("x-claude-code-session-id", "c")], user_id.clone(), "x-claude-code-session-id=c exact"),
        (
            &[("x-claude-code-session-id", "c"), ("x-claude-code-agent-id", "a")],
            none.clone(),
            "x-claude-code-session-id=c/a exact",
        ),
        (
            &[("x-claude-code-session-id", "c"), ("x-claude-code-agent-id", "null")],
            none.clone(),
            "x-claude-code-session-id=c exact",
        ),
        (&[], user_id, "metadata.user_id=0f2e7a54-1111-4222-8333-abcdefabcdef group"),
        (
            &[],
            json!({"user": format!("user_ab_account__session_{UUID}")}),
            "user=0f2e7a54-1111-4222-8333-abcdefabcdef group",
        ),
        // Codex: its plain names count only beside one of its own.
        (
            &[("thread-id", "t"), ("session-id", "root"), ("originator", "codex_cli_rs")],
            none.clone(),
            "thread-id=t exact",
        ),
        (&[("thread-id", "t"), ("session-id", "root")], none.clone(), "session-id=root exact"),
        (
            &[("x-codex-turn-metadata", r#"{"thread_id":"t2"}"#), ("x-codex-window-id", "w:0")],
            none.clone(),
            "x-codex-turn-metadata=t2 exact",
        ),
        (
            &[("x-codex-window-id", "w:0")],
            json!({"client_metadata": {"thread_id": "t3"}}),
            "client_metadata.thread_id=t3 exact",
        ),
        (&[("x-codex-window-id", "w:a:12")], none.clone(), "x-codex-window-id=w:a exact"),
        (
            &[("originator", "Codex Desktop"), ("conversation_id", "cv"), ("session_id", "s")],
            none.clone(),
            "conversation_id=cv exact",
        ),
        (&[("originator", "codex"), ("session_id", "s")], none.clone(), "session_id=s exact"),
        // opencode, goose, OpenHands, pi, Copilot
        (&[("x-session-id", "o"), ("x-session-affinity", "p")], none.clone(), "x-session-affinity=p exact"),
        (
            &[("x-opencode-session", "o"), ("agent-session-id", "g")],
            none.clone(),
            "x-opencode-session=o exact",
        ),
        (&[("agent-session-id", "g")], none.clone(), "agent-session-id=g exact"),
        (&[("goose-session-id", "g")], none.clone(), "goose-session-id=g exact"),
        (&[("x-litellm-session-id", "l")], json!({"prompt_cache_key": "p"}), "x-litellm-session-id=l exact"),
        (&[("session-id", "p")], json!({"prompt_cache_key": "p"}), "session-id=p exact"),
        (&[("x-conversation-id", "c")], none.clone(), "x-conversation-id=c exact"),
        (&[("helicone-session-id", "h")], none.clone(), "helicone-session-id=h exact"),
        // Any other agent's
        (&[("x-foo-thread-id", "f")], none.clone(), "x-foo-thread-id=f exact"),
        (&[("x-foo-bar-task-id", "f")], none.clone(), "x-foo-bar-task-id=f exact"),
        (&[("x-z-session-id", "z"), ("x-a-session-id", "a")], none.clone(), "x-a-session-id=a exact"),
        (&[("x-parent-session-id", "p"), ("x-foo-parent-thread-id", "q")], none.clone(), "-"),
        // Body
        (&[], json!({"session_id": "b", "metadata": {"session_id": "m"}}), "session_id=b exact"),
        (
            &[],
            json!({"metadata": {"session_id": "m"}, "litellm_session_id": "l"}),
            "metadata.session_id=m exact",
        ),
        (&[], json!({"litellm_session_id": "l", "rid": "r"}), "litellm_session_id=l exact"),
        (&[], json!({"rid": "r_t3"}), "rid=r exact"),
        (&[], json!({"conversation": {"id": "conv_1"}}), "conversation=conv_1 exact"),
        (&[], json!({"prompt_cache_key": "p"}), "prompt_cache_key=p group"),
        (&[("x-litellm-trace-id", "t")], none.clone(), "x-litellm-trace-id=t group"),
        // Never
        (
            &[
                ("cookie", "session_id=x"),
                ("x-client-request-id", "r"),
                ("user-agent", "u"),
                ("x-forwarded-for", "1.2.3.4"),
            ],
            json!({"user": "alice", "safety_identifier": "s"}),
            "-",
        ),
    ];
    for (headers, body, expected) in cases {
        assert_eq!(found(headers, body.clone()), *expected, "{headers:?} {body}");
    }
}

#[test]
fn bad_ids_fall_through() {
    let long = "x".repeat(257);
    for bad in ["", "  ", "null", "undefined", "default", "00000000-0000-0000-0000-000000000000", "é", &long]
    {
        let headers = [("x-session-affinity", bad), ("x-session-id", "good")];
        assert_eq!(found(&headers, json!({})), "x-session-id=good exact", "{bad:?}");
    }
    let twice = [("x-session-id", "a"), ("x-session-id", "b"), ("session-id", "c")];
    assert_eq!(found(&twice, json!({})), "session-id=c exact");
    let same = [("x-session-id", "a"), ("x-session-id", " a ")];
    assert_eq!(found(&same, json!({})), "x-session-id=a exact");
    for wrong in [json!(7), json!({}), json!(["a"]), json!(true), json!(null)] {
        let fields = json!({"session_id": wrong, "metadata": wrong, "rid": wrong, "conversation": wrong,
            "client_metadata": wrong, "user": wrong, "prompt_cache_key": "p"});
        assert_eq!(found(&[("x-codex-window-id", "")], fields), "prompt_cache_key=p group", "{wrong}");
    }
}

#[test]
fn classes_and_parents() {
    let class = |headers: &[(&str, &str)]| {
        let turn = desk().begin("/v1/chat/completions", headers, &agent(&[user("go")]));
        format!("{} {}", turn.class.as_str(), turn.parent.unwrap_or_default())
    };
    let claude = ("x-claude-code-session-id", "c");
    assert_eq!(class(&[claude]), "main ");
    assert_eq!(class(&[claude, ("x-claude-code-agent-id", "a")]), "subagent c");
    let nested = [claude, ("x-claude-code-agent-id", "a"), ("x-claude-code-parent-agent-id", "b")];
    assert_eq!(class(&nested), "subagent c/b");
    for (word, expected) in
        [("workflow", "subagent "), ("compaction", "compaction "), ("auxiliary", "aux "), ("?", "main ")]
    {
        assert_eq!(class(&[claude, ("x-claude-code-request-class", word)]), expected);
    }
    let thread = ("thread-id", "t");
    assert_eq!(class(&[thread, ("x-codex-parent-thread-id", "p")]), "subagent p");
    assert_eq!(class(&[thread, ("x-openai-subagent", "review")]), "subagent ");
    assert_eq!(class(&[thread, ("x-openai-subagent", "compact")]), "compaction ");
    assert_eq!(class(&[("x-codex-turn-metadata", r#"{"request_kind":"compaction"}"#)]), "compaction ");
    assert_eq!(class(&[("x-codex-turn-metadata", r#"{"request_kind":"prewarm"}"#)]), "probe ");
    assert_eq!(class(&[("x-codex-turn-metadata", r#"{"request_kind":"turn"}"#)]), "main ");
    assert_eq!(class(&[("x-session-id", "s"), ("x-parent-session-id", "p")]), "subagent p");
    assert_eq!(class(&[("x-interaction-type", "conversation-subagent")]), "subagent ");
}

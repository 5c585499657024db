//! The kinds of engines, and what each can do. Everything that differs between them is asked here.

use serde::{Deserialize, Serialize};

use crate::core::able::Able;

/// Kind of the workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// The reference worker of this project.
    Builtin,
    /// vLLM; P and D over its NIXL or Mooncake connector.
    Vllm,
    /// SGLang; P and D over its bootstrap server.
    Sglang,
    /// Any server with the OpenAI API, e.g. llama.cpp: each worker computes its prompts itself.
    Openai,
}

/// What engines of a kind can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// What changes a plan.
    pub able: Able,
    /// It works in pairs of P and D.
    pub pairs: bool,
    /// It decides admissions itself: a node of this project.
    pub admits: bool,
    /// Its D can hand KV back to a P.
    pub d2p: bool,
    /// It serves Responses and Messages itself, in every mode; else they are translated to chat.
    pub all_apis: bool,
    /// Its tokens are those of a `tokenizer.json`.
    pub tokenizer: bool,
    /// It goes on with an answer that another worker began, to the token.
    pub continues: bool,
}

impl EngineKind {
    /// Its name in settings and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Builtin => "builtin",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Openai => "openai",
        }
    }

    /// What it can do.
    pub const fn capabilities(self) -> Capabilities {
        let able = Able::ALL;
        // What engines do between P and D hangs on chat's own fields, whatever other APIs they have.
        let (all_apis, tokenizer) = (false, true);
        // `continue_final_message` tokenizes the text anew and counts from there: neither text nor usage stay exact.
        let continues = false;
        match self {
            Self::Builtin => {
                let (all_apis, tokenizer, continues) = (true, false, true);
                Capabilities { able, pairs: true, admits: true, d2p: true, all_apis, tokenizer, continues }
            }
            // A pulled backup lies in P's own cache, and P sends nothing without computing a token.
            Self::Vllm => {
                let able = Able { restore: false, ..able };
                Capabilities { able, pairs: true, admits: false, d2p: true, all_apis, tokenizer, continues }
            }
            // A decode server refuses a request without a bootstrap room: it neither appends nor computes.
            Self::Sglang => {
                let able = Able { direct: false, local: false, restore: false, ..able };
                Capabilities { able, pairs: true, admits: false, d2p: false, all_apis, tokenizer, continues }
            }
            Self::Openai => {
                let able = Able { restore: false, ..able };
                Capabilities { able, pairs: false, admits: false, d2p: false, all_apis, tokenizer, continues }
            }
        }
    }
}

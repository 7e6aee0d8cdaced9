//! The pages `/ui` and `/chat`: their parts, each page assembled into one document.

use std::sync::LazyLock;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use sha2::{Digest as _, Sha256};

use super::compact;

/// Parts of a page.
struct Parts {
    /// Markup, with a place for the style and one for the script.
    markup: &'static str,
    /// Style sheets, in order.
    styles: &'static [&'static str],
    /// Parts of the script, in order. They share one scope: what a part declares, later parts use.
    scripts: &'static [&'static str],
}

/// The live view.
const LIVE: Parts = Parts {
    markup: include_str!("page/index.html"),
    styles: &[include_str!("page/base.css"), include_str!("page/style.css")],
    scripts: &[
        include_str!("page/format.js"),
        include_str!("page/elements.js"),
        include_str!("page/settings.js"),
        include_str!("page/palette.js"),
        include_str!("page/announcer.js"),
        include_str!("page/copy.js"),
        include_str!("page/models.js"),
        include_str!("page/meter.js"),
        include_str!("page/roster.js"),
        include_str!("page/menu.js"),
        include_str!("page/column.js"),
        include_str!("page/rows.js"),
        include_str!("page/folding.js"),
        include_str!("page/raster.js"),
        include_str!("page/kv_map.js"),
        include_str!("page/chart.js"),
        include_str!("page/worker_details.js"),
        include_str!("page/lane.js"),
        include_str!("page/lanes.js"),
        include_str!("page/history.js"),
        include_str!("page/overview.js"),
        include_str!("page/findings.js"),
        include_str!("page/tenants.js"),
        include_str!("page/table.js"),
        include_str!("page/phases.js"),
        include_str!("page/life.js"),
        include_str!("page/connection.js"),
        include_str!("page/updates.js"),
        include_str!("page/kill.js"),
        include_str!("page/playground.js"),
        include_str!("page/load.js"),
        include_str!("page/start.js"),
        include_str!("page/main.js"),
    ],
};

/// The chat.
const CHAT: Parts = Parts {
    markup: include_str!("page/chat/index.html"),
    styles: &[include_str!("page/base.css"), include_str!("page/chat/style.css")],
    scripts: &[
        include_str!("page/format.js"),
        include_str!("page/elements.js"),
        include_str!("page/settings.js"),
        include_str!("page/palette.js"),
        include_str!("page/announcer.js"),
        include_str!("page/copy.js"),
        include_str!("page/models.js"),
        include_str!("page/meter.js"),
        include_str!("page/menu.js"),
        include_str!("page/rows.js"),
        include_str!("page/phases.js"),
        include_str!("page/connection.js"),
        include_str!("page/kill.js"),
        include_str!("page/chat/markdown.js"),
        include_str!("page/chat/conversation.js"),
        include_str!("page/chat/strip.js"),
        include_str!("page/chat/trace.js"),
        include_str!("page/chat/watch.js"),
        include_str!("page/chat/turn.js"),
        include_str!("page/chat/stream.js"),
        include_str!("page/chat/main.js"),
    ],
};

/// A document, and what its Content-Security-Policy needs.
#[derive(Debug)]
pub(crate) struct Page {
    /// The whole document.
    pub(crate) html: String,
    /// SHA-256 of the script between its tags, in base64: `script-src 'sha256-…'`.
    pub(crate) script_sha256: String,
}

impl Page {
    /// Returns the page of the live view, which is assembled at the first call.
    pub(crate) fn live() -> &'static Self {
        static PAGE: LazyLock<Page> = LazyLock::new(|| Page::assemble(&LIVE));
        &PAGE
    }

    /// Returns the page of the chat, which is assembled at the first call.
    pub(crate) fn chat() -> &'static Self {
        static PAGE: LazyLock<Page> = LazyLock::new(|| Page::assemble(&CHAT));
        &PAGE
    }

    fn assemble(parts: &Parts) -> Self {
        let styles: String = parts.styles.iter().copied().map(compact::style).collect();
        let scripts: String = parts.scripts.iter().copied().map(compact::script).collect();
        let script = format!("\"use strict\";\n(() => {{\n{scripts}}})();\n");
        let html = compact::markup(parts.markup).replacen("/*STYLE*/", &styles, 1).replacen(
            "/*SCRIPT*/",
            &script,
            1,
        );
        Self { html, script_sha256: BASE64_STANDARD.encode(Sha256::digest(script.as_bytes())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of both pages together.
    const BYTES_MAX: usize = 200_000;

    fn pages() -> [&'static Page; 2] {
        [Page::live(), Page::chat()]
    }

    #[test]
    fn each_page_is_one_document_without_anything_from_elsewhere_and_both_are_small() {
        let bytes = pages().map(|page| page.html.len());
        assert!(bytes.iter().sum::<usize>() <= BYTES_MAX, "{bytes:?} bytes");
        for page in pages() {
            assert_eq!(page.html.matches("<script").count(), 1);
            assert_eq!(page.html.matches("</script").count(), 1);
            let (_, script) = page.html.split_once("<script>").expect("a script");
            let (script, _) = script.split_once("</script>").expect("the script's end");
            assert_eq!(BASE64_STANDARD.encode(Sha256::digest(script.as_bytes())), page.script_sha256);
            let icon = page.html.matches("<link rel=\"icon\" href=\"data:").count();
            assert_eq!((icon, page.html.matches("<link").count()), (1, 1));
            for elsewhere in ["http://", "https://", "@import", "url(", " src=", "<iframe"] {
                assert!(!page.html.contains(elsewhere), "a page has {elsewhere}");
            }
        }
    }

    #[test]
    fn nothing_that_a_client_or_a_model_wrote_can_become_markup_or_script() {
        // The policy forbids attributes with script; attributes with style stay out of the markup too.
        let forbidden = [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
            "srcdoc",
            " style=",
            " onclick=",
            "javascript:",
        ];
        for page in pages() {
            for word in forbidden {
                assert!(!page.html.contains(word), "a page has {word}");
            }
        }
    }

    #[test]
    fn no_string_or_comment_of_a_part_spans_lines() {
        for part in LIVE.scripts.iter().chain(CHAT.scripts) {
            for line in part.lines() {
                assert!(line.matches('`').count() % 2 == 0 && !line.contains("/*"), "{line}");
            }
        }
        for line in LIVE.styles.iter().chain(CHAT.styles).flat_map(|part| part.lines()) {
            assert_eq!(line.contains("/*"), line.contains("*/"), "{line}");
        }
    }
}

//! The page `/ui`: its parts, assembled into one document.

use std::sync::LazyLock;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use sha2::{Digest as _, Sha256};

/// Markup, with a place for the style and one for the script.
const MARKUP: &str = include_str!("page/index.html");

/// Style sheet.
const STYLE: &str = include_str!("page/style.css");

/// Parts of the script, in order. They share one scope: what a part declares, later parts use.
const SCRIPT: [&str; 27] = [
    include_str!("page/format.js"),
    include_str!("page/palette.js"),
    include_str!("page/elements.js"),
    include_str!("page/settings.js"),
    include_str!("page/announcer.js"),
    include_str!("page/roster.js"),
    include_str!("page/menu.js"),
    include_str!("page/column.js"),
    include_str!("page/rows.js"),
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
    include_str!("page/playground.js"),
    include_str!("page/load.js"),
    include_str!("page/start.js"),
    include_str!("page/main.js"),
];

/// The document, and what its Content-Security-Policy needs.
#[derive(Debug)]
pub(crate) struct Page {
    /// The whole document.
    pub(crate) html: String,
    /// SHA-256 of the script between its tags, in base64: `script-src 'sha256-…'`.
    pub(crate) script_sha256: String,
}

impl Page {
    /// Returns the page, which is assembled at the first call.
    pub(crate) fn get() -> &'static Self {
        static PAGE: LazyLock<Page> = LazyLock::new(Page::assemble);
        &PAGE
    }

    fn assemble() -> Self {
        let script = format!("\"use strict\";\n(() => {{\n{}}})();\n", SCRIPT.concat());
        let html = MARKUP.replacen("/*STYLE*/", STYLE, 1).replacen("/*SCRIPT*/", &script, 1);
        Self { html, script_sha256: BASE64_STANDARD.encode(Sha256::digest(script.as_bytes())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_one_small_document_without_anything_from_elsewhere() {
        let page = Page::get();
        assert!(page.html.len() < 200_000, "{} bytes", page.html.len());
        assert_eq!(page.html.matches("<script").count(), 1);
        assert_eq!(page.html.matches("</script").count(), 1);
        let (_, script) = page.html.split_once("<script>").expect("a script");
        let (script, _) = script.split_once("</script>").expect("the script's end");
        assert_eq!(BASE64_STANDARD.encode(Sha256::digest(script.as_bytes())), page.script_sha256);
        let icon = page.html.matches("<link rel=\"icon\" href=\"data:").count();
        assert_eq!((icon, page.html.matches("<link").count()), (1, 1));
        for elsewhere in ["http://", "https://", "@import", "url(", " src=", "<iframe"] {
            assert!(!page.html.contains(elsewhere), "the page has {elsewhere}");
        }
    }

    #[test]
    fn nothing_that_a_client_named_can_become_markup_or_script() {
        // The policy forbids attributes with script; attributes with style stay out of the markup too.
        let html = &Page::get().html;
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
        for word in forbidden {
            assert!(!html.contains(word), "the page has {word}");
        }
    }
}

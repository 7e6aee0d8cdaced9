use std::sync::Arc;
use std::time::Instant;
use inflight_contract::SamplingSpec;
use inflight_worker::models::{ModelDir, ModelSource};
use inflight_worker::runtime::cpu::{CpuOptions, CpuRuntime};
use inflight_worker::runtime::{Batch, Runtime, SlotSetup};

#[test]
fn bench() {
    let t = Instant::now();
    let model = ModelDir::open(&ModelSource::Embedded).unwrap();
    println!("open {:?}", t.elapsed());
    for threads in [1, 2] {
        let t = Instant::now();
        let o = CpuOptions { threads: Some(threads), kv_bytes: 1 << 30, block_tokens: 16, slots: 64, batch_tokens: 512, context_tokens: None, isa: None };
        let mut r = CpuRuntime::load(&model, &o, &|_, _| {}).unwrap();
        println!("load {:?} {:?}", t.elapsed(), r.capabilities());
        for temp in [0.0, 0.7] {
        for seqs in [1u32, 8, 32] {
            let sp = Arc::new(SamplingSpec { temperature: temp, top_p: if temp > 0.0 {0.9} else {1.0}, ..Default::default() }.validate().unwrap());
            let mut b = Batch::default();
            let mut out = vec![];
            for s in 0..seqs { r.attach(s, &SlotSetup { sampling: sp.clone(), choice: 0, prompt: &[], generated: &[], eos_token_ids: &[] }).unwrap(); }
            let tables: Vec<Vec<u32>> = (0..seqs).map(|s| (0..64).map(|i| s * 64 + i).collect()).collect();
            let steps = 512;
            let t = Instant::now();
            for pos in 0..steps {
                b.clear();
                for s in 0..seqs { b.push_sequence(&[7 + s + pos % 100], pos, &tables[s as usize]); b.sample_last_row(s); }
                r.execute(&b, &mut out).unwrap();
            }
            let e = t.elapsed();
            println!("threads {threads} temp {temp} seqs {seqs}: step {:?}, {:.0} tok/s", e / steps, (seqs * steps) as f64 / e.as_secs_f64());
        }}
        let mut b = Batch::default();
        let toks: Vec<u32> = (0..512).collect();
        let tab: Vec<u32> = (0..64).collect();
        let t = Instant::now();
        for _ in 0..20 { b.clear(); b.push_sequence(&toks, 0, &tab); b.sample_last_row(0); r.execute(&b, &mut vec![]).unwrap(); }
        println!("prefill 512: {:?}", t.elapsed() / 20);
    }
}

package main

import (
	"bytes"
	"fmt"
	"testing"
)

// What a record costs on its way in and out: import and export are bound by it on a fast server.
func BenchmarkRecordJSON(b *testing.B) {
	for _, size := range []int{100, 1000} {
		r := record{key: []byte("sixteen-byte-key"), value: bytes.Repeat([]byte("line\n"), size/5)}
		line := r.appendJSON(nil, false)
		b.Run(fmt.Sprintf("op=parse/value=%dB", size), func(b *testing.B) {
			b.SetBytes(int64(len(line)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := parseJSONLine(line); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("op=append/value=%dB", size), func(b *testing.B) {
			b.SetBytes(int64(len(line)))
			b.ReportAllocs()
			for b.Loop() {
				line = r.appendJSON(line[:0], false)
			}
		})
	}
}

package clients

import (
	"encoding/binary"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/epochkv/epochkv/client"
)

// BenchmarkPipeline is the throughput of one Go client with the real server over one stream:
// 16-byte keys, 100-byte values.
func BenchmarkPipeline(b *testing.B) {
	endpoint := "127.0.0.1:17455"
	server := exec.Command(filepath.Join(bin, "kvserver"), "--data-dir", b.TempDir(), "--listen", endpoint, "--http", "")
	if err := server.Start(); err != nil {
		b.Fatal(err)
	}
	defer func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}()
	c, err := client.Dial(endpoint, client.WithRetry(client.Retry{Attempts: 50, Base: 20 * time.Millisecond, Max: 100 * time.Millisecond}))
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Status(b.Context()); err != nil {
		b.Fatal(err)
	}
	value := make([]byte, 100)
	for _, op := range []struct {
		name string
		do   func(p *client.Pipeline, key []byte) error
	}{
		{"put-async", func(p *client.Pipeline, key []byte) error { return p.Put(key, value, nil, client.Async()) }},
		{"put-sync", func(p *client.Pipeline, key []byte) error { return p.Put(key, value, nil, client.Sync()) }},
		{"get", func(p *client.Pipeline, key []byte) error { return p.Get(key, func(client.Value, error) {}) }},
	} {
		b.Run("op="+op.name, func(b *testing.B) {
			p, err := c.Pipeline(b.Context(), client.PipelineOptions{})
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				key := binary.BigEndian.AppendUint64(make([]byte, 8, 16), uint64(i%100_000)*0x9e3779b97f4a7c15)
				if err := op.do(p, key); err != nil {
					b.Fatal(err)
				}
			}
			if err := p.Close(); err != nil {
				b.Fatal(err)
			}
		})
	}
}

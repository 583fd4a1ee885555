package client_test

import (
	"testing"

	"github.com/epochkv/epochkv/client"
	"github.com/epochkv/epochkv/client/clienttest"
)

// BenchmarkPipelinePut is what the client costs per put, beside a server that does next to nothing.
func BenchmarkPipelinePut(b *testing.B) {
	s := clienttest.Start(b)
	c, err := client.Dial(s.Endpoint)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	p, err := c.Pipeline(b.Context(), client.PipelineOptions{})
	if err != nil {
		b.Fatal(err)
	}
	key, value := []byte("sixteen-byte-key"), make([]byte, 100)
	b.ReportAllocs()
	for b.Loop() {
		if err := p.Put(key, value, nil); err != nil {
			b.Fatal(err)
		}
	}
	if err := p.Close(); err != nil {
		b.Fatal(err)
	}
}

package server

import (
	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/transport"
)

// getStreamChunkBytes is the most that a message of GetStream has of a value. It is far below the 4 MiB that clients of gRPC
// accept by default, and large enough that messages cost nothing beside their bytes.
const getStreamChunkBytes = 256 << 10

// GetStream implements KVService. It is a Get whose answer is sent in parts: the value is counted until the last of them has
// been sent, and a client that takes nothing of it loses its connection, as with Get.
func (s *kvService) GetStream(req *pb.GetStreamRequest, stream grpc.ServerStreamingServer[pb.GetStreamResponse]) error {
	ctx := stream.Context()
	return s.serveStream(ctx, telemetry.MethodGetStream, func(conn *connection) error {
		size := req.SizeVT()
		if err := s.admit(ctx, conn, kindRead, shareSmallReads, size); err != nil {
			return err
		}
		found, err := s.Get(ctx, &pb.GetRequest{Key: req.Key, SnapshotEpoch: req.SnapshotEpoch, SnapshotTimeUs: req.SnapshotTimeUs})
		answer, err := s.finish(ctx, conn, shareSmallReads, found, err)
		s.admission.leave(conn, shareSmallReads, size)
		if err != nil {
			return err
		}
		accessOf(ctx).sent(found)
		var charge *memoryCharge
		if counted, ok := answer.(*chargedMessage); ok {
			charge = counted.charge
			transport.RequireProgress(ctx)
		}
		return sendParts(stream, found, charge)
	})
}

// sendParts sends an answer in chunks. The last one takes the charge to the transport, which may send it long after the request has ended. If it is
// small, little waits then: the transport takes it only when most of what is before it has been sent.
func sendParts(stream grpc.ServerStream, found *pb.GetResponse, charge *memoryCharge) error {
	part := pb.GetStreamResponse{
		Found: found.Found, Epoch: found.Epoch, ReadEpoch: found.ReadEpoch, ExpiresAtMs: found.ExpiresAtMs, Size: uint64(len(found.Value)),
	}
	for rest := found.Value; ; {
		n := min(len(rest), getStreamChunkBytes)
		part.Chunk, rest = rest[:n], rest[n:]
		last, message := len(rest) == 0, any(&part)
		takesCharge := last && charge != nil && n >= countedBytesMin
		if takesCharge {
			message = &chargedMessage{encoder: &part, charge: charge}
		}
		err := stream.SendMsg(message)
		if err != nil || last && !takesCharge {
			charge.release()
		}
		if err != nil || last {
			return err
		}
		part.Reset()
	}
}

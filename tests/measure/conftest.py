from blobs import blobs as blobs
from blobs import make_net as make_net

variable "region" {
  description = "AWS region."
  type        = string
  default     = "us-east-1"
}

variable "name" {
  description = "Prefix of all names except those of queues, which are named after their machines."
  type        = string
  default     = "cleanrl"
}

variable "instance_types" {
  description = "Instance types. Each gets two queues: c5a.large gives c5a-large and c5a-large-spot."
  type        = set(string)
  default     = ["c5a.large", "m6gd.medium", "g4dn.xlarge"]
}

variable "max_vcpus" {
  description = "Most CPUs that a queue may use at once. An empty queue runs no machine and costs nothing."
  type        = number
  default     = 256
}

variable "secret_names" {
  description = "Variables whose values AWS Secrets Manager holds and passes to containers."
  type        = set(string)
  default     = ["WANDB_API_KEY"]
}

variable "shared_runs" {
  description = "Make a file system for the runs, so that a run whose machine is taken away can resume."
  type        = bool
  default     = true
}

variable "subnet_ids" {
  description = "Subnets of the machines; empty: those of the account's default network."
  type        = list(string)
  default     = []
}
